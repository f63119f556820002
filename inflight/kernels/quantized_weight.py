"""`QuantizedWeight`: a weight of 4 or 8 bits. Every quantized checkpoint format is read into this one form."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

GROUP_SIZE_MULTIPLE = {4: 32, 8: 16}  # bits of a weight -> the size of its groups is a multiple of this
# Sizes of the ranges that are tried for a group, relative to the range from the group's smallest to its largest weight.
_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)
_AT_ONCE = 2**24  # number of weights that are quantized at once; each temporary tensor then has 64 MB


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """weight[n, k] = scales[n, k // group_size] * values[n, k] - offsets[n, k // group_size].

    A group is `group_size` neighbouring weights of a row. There are three kinds of weights, and each has its own kernels:

    - symmetric, with one group per row: `values` are int8, `offsets` is None, `bits` is 8.
    - with offsets: `values` are uint8 in [0, 2**bits), `bits` is 4 or 8, and the group size divides in_features and is a
      multiple of 32, or of 16 with 8 bits. For a format with integer zero points z, offsets = scales * z.
    - with a table: weight[n, k] = scales[n, k // group_size] * table[values[n, k]]. `values` are uint8 in [0, 16), `bits` is 4,
      `offsets` is None, and the group size divides in_features and is a multiple of 32.

    Attributes:
        values: [out_features, in_features], one byte each, contiguous.
        scales, offsets: float32 [out_features, in_features // group_size].
        bits: 4 or 8.
        table: sixteen integers in [-127, 127], or ().
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor | None
    bits: int
    table: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.values.dim() == 2 and self.scales.shape[0] == self.values.shape[0], self.values.shape
        assert self.values.dtype == (torch.int8 if self.is_symmetric else torch.uint8), self.values.dtype
        if self.is_symmetric:
            assert self.scales.shape[1] == 1 and self.bits == 8, (self.scales.shape, self.bits)
            return
        assert self.values.shape[1] % self.scales.shape[1] == 0
        assert self.group_size % GROUP_SIZE_MULTIPLE[self.bits] == 0, (self.group_size, self.bits)
        if self.offsets is None:
            assert self.bits == 4 and len(self.table) == 16
        else:
            assert self.offsets.shape == self.scales.shape and not self.table

    @property
    def shape(self) -> torch.Size:
        """[out_features, in_features]"""
        return self.values.shape

    @property
    def group_size(self) -> int:
        """The number of input features in a group. If a row is one group, it is in_features."""
        return self.values.shape[1] // self.scales.shape[1]

    @property
    def is_symmetric(self) -> bool:
        return self.offsets is None and not self.table

    @property
    def format(self) -> tuple[int, int, bool]:
        """(bits, group size, whether it is symmetric). Weights with equal formats and tables can be concatenated as they
        are."""
        return self.bits, self.group_size, self.is_symmetric

    def to(self, device: torch.device) -> "QuantizedWeight":
        return self.changed(self.values.to(device), lambda each: each.to(device))

    def changed(self, values: Tensor, change: Callable[[Tensor], Tensor]) -> "QuantizedWeight":
        """The weight with these values, and with the scales and offsets that `change` makes of its own."""
        offsets = None if self.offsets is None else change(self.offsets)
        return replace(self, values=values, scales=change(self.scales), offsets=offsets)

    def dequantize(self) -> Tensor:
        """float32 [out_features, in_features]."""
        num_rows, num_groups = self.scales.shape
        grouped = self.integers().view(num_rows, num_groups, -1).float() * self.scales[..., None]
        if self.offsets is not None:
            grouped -= self.offsets[..., None]
        return grouped.view(self.values.shape)

    def without_table(self) -> "QuantizedWeight":
        """The same weight in 8 bits with offsets, if it has a table; otherwise itself."""
        return _as_bytes(self) if self.table else self

    def integers(self) -> Tensor:
        """What the scales are multiplied by: int8 [out_features, in_features], or uint8 if there are offsets."""
        if not self.table:
            return self.values
        table = torch.tensor(self.table, dtype=torch.int8, device=self.values.device)
        return table[self.values.int()]


def fitting_group_size(in_features: int, group_size: int) -> int | None:
    """The first of `group_size`, half of it, a quarter, ... that divides `in_features`. None if it is less than 32, the
    smallest size with 4 bits."""
    while in_features % group_size != 0:
        group_size //= 2
        if group_size < GROUP_SIZE_MULTIPLE[4]:
            return None
    return group_size


def split_groups(weight: QuantizedWeight, group_size: int) -> QuantizedWeight:
    """Returns the same weight in smaller groups. `group_size` must divide `weight.group_size`."""
    times = weight.group_size // group_size
    if times == 1 or weight.is_symmetric:
        return weight
    return weight.changed(weight.values, lambda each: each.repeat_interleave(times, dim=1))


def concatenate_rows(weights: list[QuantizedWeight]) -> QuantizedWeight | None:
    """Returns one weight with the rows of all `weights`. If their formats differ, the result has 8 bits, so that nothing is
    lost, and its group size divides the group size of every weight. None if no such group size is a multiple of 16."""
    if len({(weight.format, weight.table) for weight in weights}) > 1:
        group_size = math.gcd(*(weight.group_size for weight in weights))
        if group_size % GROUP_SIZE_MULTIPLE[8] != 0:
            return None
        weights = [split_groups(_as_bytes(weight), group_size) for weight in weights]
    offsets = [weight.offsets for weight in weights if weight.offsets is not None]
    return QuantizedWeight(
        values=torch.cat([weight.values for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        offsets=torch.cat(offsets) if offsets else None,
        bits=weights[0].bits,
        table=weights[0].table,
    )


def select_rows(weight: Tensor | QuantizedWeight, rows: Tensor) -> Tensor | QuantizedWeight:
    """Returns the weight (or vector) whose row i is row `rows[i]` of `weight`."""
    if isinstance(weight, Tensor):
        return weight[rows]
    return weight.changed(weight.values[rows], lambda each: each[rows])


def _as_bytes(weight: QuantizedWeight) -> QuantizedWeight:
    """Returns the same weight in 8 bits, with one offset per group."""
    if weight.offsets is not None:
        return replace(weight, bits=8)
    values = weight.integers().view(torch.uint8) ^ 128
    return QuantizedWeight(values=values, scales=weight.scales, offsets=weight.scales * 128, bits=8)


def quantize_rows(weight: Tensor, *, bits: int, group_size: int) -> QuantizedWeight:
    """Quantizes `weight` [out_features, in_features] in plain torch, on any device. The C++ kernels do the same on a CPU.

    8 bits: one scale per row, symmetric; `group_size` is not used. 4 bits: one scale and one offset per group of `group_size`
    weights in a row. For each group five ranges are tried: from the group's smallest to its largest weight, and four narrower
    ranges. The range with the least squared error is used.
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
    low, high = weight.amin(dim=2).clamp_(max=0), weight.amax(dim=2).clamp_(min=0)  # the range always includes zero
    least = torch.full_like(low, torch.inf)
    scales, offsets = torch.empty_like(low), torch.empty_like(low)
    for shrink in _SHRINK:
        scale = ((high - low) * shrink / 15).clamp_(min=1e-30)
        offset = -low * shrink
        dequantized = _rounded(weight, scale, offset) * scale[..., None] - offset[..., None]
        error = dequantized.sub_(weight)
        total = error.square_().sum(dim=2)
        is_better = total < least
        for kept, found in ((least, total), (scales, scale), (offsets, offset)):
            kept.copy_(torch.where(is_better, found, kept))
    return _rounded(weight, scales, offsets).to(torch.uint8), scales, offsets


def _rounded(weight: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return (weight + offset[..., None]).mul_(scale.reciprocal()[..., None]).round_().clamp_(0, 15)
