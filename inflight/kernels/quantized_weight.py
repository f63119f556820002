"""`QuantizedWeight`: a weight of 4 or 8 bits. Every quantized checkpoint format is read into this one form."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

GROUP_SIZE_MULTIPLE = 32


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """weight[n, k] = scales[n, k // group_size] * values[n, k] - offsets[n, k // group_size].

    A group is `group_size` neighbouring weights of a row. There are two kinds of weights, and each has its own kernels:

    - symmetric, with one group per row: `values` are int8, `offsets` is None, `bits` is 8.
    - with offsets: `values` are uint8 in [0, 2**bits), `bits` is 4 or 8, and the group size is a multiple of 32 that divides
      in_features. For a format with integer zero points z, offsets = scales * z.

    Attributes:
        values: [out_features, in_features], one byte each, contiguous.
        scales, offsets: float32 [out_features, in_features // group_size].
        bits: 4 or 8.
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor | None
    bits: int

    def __post_init__(self) -> None:
        assert self.values.dim() == 2 and self.scales.shape[0] == self.values.shape[0], self.values.shape
        assert self.values.dtype == (torch.int8 if self.offsets is None else torch.uint8), self.values.dtype
        if self.offsets is None:
            assert self.scales.shape[1] == 1 and self.bits == 8, (self.scales.shape, self.bits)
        else:
            assert self.offsets.shape == self.scales.shape and self.values.shape[1] % self.scales.shape[1] == 0
            assert self.group_size % GROUP_SIZE_MULTIPLE == 0 and self.bits in (4, 8), (self.group_size, self.bits)

    @property
    def shape(self) -> torch.Size:
        """[out_features, in_features]"""
        return self.values.shape

    @property
    def group_size(self) -> int:
        """The number of input features in a group. If a row is one group, it is in_features."""
        return self.values.shape[1] // self.scales.shape[1]

    @property
    def format(self) -> tuple[int, int, bool]:
        """(bits, group size, whether it is symmetric). Weights with equal formats can be concatenated as they are."""
        return self.bits, self.group_size, self.offsets is None

    def to(self, device: torch.device) -> QuantizedWeight:
        return QuantizedWeight(
            values=self.values.to(device),
            scales=self.scales.to(device),
            offsets=None if self.offsets is None else self.offsets.to(device),
            bits=self.bits,
        )

    def dequantize(self) -> Tensor:
        """float32 [out_features, in_features]."""
        grouped = self.values.view(len(self.values), self.scales.shape[1], -1).float() * self.scales[..., None]
        if self.offsets is not None:
            grouped -= self.offsets[..., None]
        return grouped.view(self.values.shape)


def split_groups(weight: QuantizedWeight, group_size: int) -> QuantizedWeight:
    """Returns the same weight in smaller groups. `group_size` must divide `weight.group_size`."""
    times = weight.group_size // group_size
    if times == 1 or weight.offsets is None:
        return weight
    scales, offsets = (each.repeat_interleave(times, dim=1) for each in (weight.scales, weight.offsets))
    return replace(weight, scales=scales, offsets=offsets)


def concatenate_rows(weights: list[QuantizedWeight]) -> QuantizedWeight | None:
    """Returns one weight with the rows of all `weights`. If their formats differ, the result has 8 bits, so that nothing is
    lost, and its group size divides the group size of every weight. None if no such group size is a multiple of 32."""
    if len({weight.format for weight in weights}) > 1:
        group_size = math.gcd(*(weight.group_size for weight in weights))
        if group_size % GROUP_SIZE_MULTIPLE != 0:
            return None
        weights = [split_groups(_as_bytes(weight), group_size) for weight in weights]
    offsets = [weight.offsets for weight in weights if weight.offsets is not None]
    return QuantizedWeight(
        values=torch.cat([weight.values for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        offsets=torch.cat(offsets) if offsets else None,
        bits=weights[0].bits,
    )


def _as_bytes(weight: QuantizedWeight) -> QuantizedWeight:
    """Returns the same weight in 8 bits, with one offset per group."""
    if weight.offsets is None:
        values, offsets = weight.values.view(torch.uint8) ^ 128, weight.scales * 128
    else:
        values, offsets = weight.values, weight.offsets
    return QuantizedWeight(values=values, scales=weight.scales, offsets=offsets, bits=8)
