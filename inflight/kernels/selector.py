"""`select_layer_ops`: chooses the kernels of norms and rotary embedding for a device and a dtype."""

from __future__ import annotations

import torch

from inflight.kernels.cpu.layer_ops import CpuLayerOps
from inflight.kernels.cpu.library import DTYPES, load_kernels
from inflight.kernels.layer_ops import LayerOps, TorchLayerOps


def select_layer_ops(device: torch.device, dtype: torch.dtype) -> LayerOps:
    """Returns the Triton kernels on an NVIDIA GPU, and on a CPU the C++ kernels or, if they cannot be used, plain torch."""
    if device.type == "cuda":
        from inflight.kernels.triton.layer_ops import TritonLayerOps

        return TritonLayerOps()
    if device.type == "cpu" and dtype in DTYPES:
        kernels = load_kernels()
        if kernels is not None:
            return CpuLayerOps(kernels)
    return TorchLayerOps()
