"""What a layer's cache takes in each dtype; every name is one that the arena can be viewed in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inflight.attention.backend import AttentionParams
from inflight.device.base import TORCH_DTYPES
from inflight.layers.attention import Attention


@pytest.mark.parametrize(
    ("dtype", "bytes_per_head"),
    [(torch.float32, 64), (torch.bfloat16, 32), (torch.int8, 16 + 4), (torch.float8_e4m3fn, 16)],
)
def test_integers_have_a_scale_and_floats_have_none(dtype: torch.dtype, bytes_per_head: int) -> None:
    backend: Any = None  # Any: not asked
    layer = Attention("x", num_heads=4, num_kv_heads=2, head_dim=16, params=AttentionParams(1), backend=backend)
    spec = layer.kv_cache_spec(8, dtype)
    assert TORCH_DTYPES[spec.dtype] == dtype
    assert spec.bytes_per_token == 2 * 2 * bytes_per_head
