"""Quantizes weights to 8 or 4 bits in plain torch, on any device. The C++ kernels do the same on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.kernels.quantized_weight import QuantizedWeight

# Sizes of the ranges to try, as parts of the range from a group's smallest to its largest weight.
_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)
_AT_ONCE = 2**24  # number of weights that are quantized at once; each temporary tensor then has 64 MB


def quantize_rows(weight: Tensor, *, bits: int, group_size: int) -> QuantizedWeight:
    """Quantizes `weight` [out_features, in_features].

    8 bits: one scale per row, symmetric. 4 bits: one scale and one offset per group of `group_size` weights in a row. For each
    group five ranges are tried: from its smallest to its largest weight, and four narrower ranges. The range with the least
    squared error is used.
    """
    out_features, in_features = weight.shape
    num_groups = 1 if bits == 8 else in_features // group_size
    values = weight.new_empty((out_features, in_features), dtype=torch.int8 if bits == 8 else torch.uint8)
    scales = weight.new_empty((out_features, num_groups), dtype=torch.float32)
    offsets = None if bits == 8 else torch.empty_like(scales)
    step = max(1, _AT_ONCE // in_features)
    for first in range(0, out_features, step):
        rows = slice(first, first + step)
        if offsets is None:
            values[rows], scales[rows] = _symmetric(weight[rows].float())
        else:
            grouped = weight[rows].float().view(-1, num_groups, group_size)
            quantized, scales[rows], offsets[rows] = _groups(grouped)
            values[rows] = quantized.flatten(1)
    return QuantizedWeight(values=values, scales=scales, offsets=offsets, bits=bits)


def _symmetric(weight: Tensor) -> tuple[Tensor, Tensor]:
    most = weight.abs().amax(dim=1, keepdim=True)
    inverse = torch.where(most > 0, torch.full_like(most, 127) / most, 0)
    return torch.round(weight * inverse).to(torch.int8), most / torch.full_like(most, 127)


def _groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight [rows, num_groups, group_size] -> values, and one scale and one offset per group."""
    low, high = weight.amin(dim=2).clamp_(max=0), weight.amax(dim=2).clamp_(min=0)  # zero stays in the range
    least = torch.full_like(low, torch.inf)
    scales, offsets = torch.empty_like(low), torch.empty_like(low)
    for shrink in _SHRINK:
        scale = ((high - low) * shrink / 15).clamp_(min=1e-30)
        offset = -low * shrink
        error = (_rounded(weight, scale, offset) * scale[..., None] - offset[..., None]).sub_(weight)
        total = error.square_().sum(dim=2)
        is_better = total < least
        for kept, found in ((least, total), (scales, scale), (offsets, offset)):
            kept.copy_(torch.where(is_better, found, kept))
    return _rounded(weight, scales, offsets).to(torch.uint8), scales, offsets


def _rounded(weight: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return (weight + offset[..., None]).mul_(scale.reciprocal()[..., None]).round_().clamp_(0, 15)
