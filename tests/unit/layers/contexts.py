"""`LayerContext`s for tests of single layers."""

from __future__ import annotations

import torch

from inflight.attention.torch_sdpa import TorchSdpaBackend
from inflight.config.engine import QuantizationConfig
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.context import LayerContext, make_context


def layer_context(dtype: torch.dtype, tp: TensorParallelGroup | None = None) -> LayerContext:
    """Without `tp`, the rank is alone."""
    return make_context(
        dtype=dtype,
        device=torch.device("cpu"),
        tp=tp or TensorParallelGroup(),
        backend=TorchSdpaBackend(),
        quantization=QuantizationConfig(),
    )
