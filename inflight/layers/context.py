"""`LayerContext`: what the layers of a model share: dtype, device, tensor-parallel group, attention backend, linear methods."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inflight.attention.backend import AttentionBackend
from inflight.config.engine import QuantizationConfig
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.linear_method import LinearMethod, select_linear_method


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """One per model and rank. `linear` and `head` compute the layers' products and the head's.

    `allocates_later`: large weights have shapes but no memory yet; the loader allocates it.
    """

    dtype: torch.dtype
    device: torch.device
    tp: TensorParallelGroup
    backend: AttentionBackend
    linear: LinearMethod
    head: LinearMethod
    allocates_later: bool = False

    @property
    def weight_device(self) -> torch.device:
        """The device on which layers create their large weights."""
        return torch.device("meta") if self.allocates_later else self.device


def make_context(
    *,
    dtype: torch.dtype,
    device: torch.device,
    tp: TensorParallelGroup,
    backend: AttentionBackend,
    quantization: QuantizationConfig,
) -> LayerContext:
    """
    Raises:
        ConfigError: the quantization needs kernels that are not there.
    """
    linear, head = (
        select_linear_method(device, dtype, out_dtype=out_dtype, quantization=kind, group_size=quantization.group_size)
        for kind, out_dtype in ((quantization.layers, dtype), (quantization.head, torch.float32))
    )
    return LayerContext(dtype=dtype, device=device, tp=tp, backend=backend, linear=linear, head=head)
