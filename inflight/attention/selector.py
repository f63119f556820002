"""Which attention backend serves a device."""

from __future__ import annotations

import torch

from inflight.attention.backend import AttentionBackend
from inflight.attention.torch_sdpa import TorchSdpaBackend


def get_backend(device_kind: str, head_dim: int, dtype: torch.dtype) -> AttentionBackend:
    """A fresh backend for `device_kind` ("cpu"). Plain torch serves every head dimension and floating dtype."""
    assert head_dim > 0, f"head_dim is {head_dim}"
    assert dtype.is_floating_point, f"{dtype} is no dtype for attention"
    return TorchSdpaBackend(torch.device(device_kind))
