"""Which kernels serve a device and dtype."""

from __future__ import annotations

import torch

from inflight.kernels.cpu.layer_ops import CpuLayerOps
from inflight.kernels.cpu.library import DTYPES, load_kernels
from inflight.kernels.cpu.token_masks import cpu_apply_token_masks
from inflight.kernels.layer_ops import LayerOps, TorchLayerOps
from inflight.kernels.token_masks import ApplyTokenMasks, torch_apply_token_masks


def select_layer_ops(device: torch.device, dtype: torch.dtype) -> LayerOps:
    """The C++ kernels where they are, Triton's on NVIDIA GPUs, plain torch everywhere else."""
    if device.type == "cuda":
        from inflight.kernels.triton.layer_ops import TritonLayerOps

        return TritonLayerOps()
    if device.type == "cpu" and dtype in DTYPES:
        kernels = load_kernels()
        if kernels is not None:
            return CpuLayerOps(kernels)
    return TorchLayerOps()


def select_apply_token_masks(device: torch.device) -> ApplyTokenMasks:
    """As `select_layer_ops`."""
    if device.type == "cuda":
        from inflight.kernels.triton.token_masks import triton_apply_token_masks

        return triton_apply_token_masks
    kernels = load_kernels() if device.type == "cpu" else None
    return torch_apply_token_masks if kernels is None else cpu_apply_token_masks(kernels)
