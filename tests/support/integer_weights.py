"""Weights of 4 and 8 bits in all forms that the C++ kernels multiply."""

from __future__ import annotations

import torch

from inflight.kernels.quantized_weight import QuantizedWeight

# Arguments of `integer_weight`
INTEGER_WEIGHTS = [
    (8, 252, 1, "signed"),
    (8, 512, 1, "signed"),
    (8, 512, 1, "offsets"),
    (8, 16, 9, "middle"),
    (8, 32, 5, "middle"),
    (8, 64, 3, "offsets"),
    (8, 96, 3, "middle"),
    (4, 32, 7, "table"),
    (4, 64, 3, "middle"),
    (4, 96, 3, "offsets"),
    (4, 128, 2, "table"),
    (4, 288, 1, "middle"),
]


def integer_weight(bits: int, group_size: int, num_groups: int, zero: str) -> QuantizedWeight:
    """Of 70 output features. `zero`: the integers have a sign ("signed"), or the "middle" of their range means 0, or there are
    "offsets" or a "table"."""
    generator = torch.Generator().manual_seed(bits + group_size)
    values = torch.randint(0, 2**bits, (70, num_groups * group_size), generator=generator).to(torch.uint8)
    scales = torch.rand(70, num_groups, generator=generator) + 0.1
    if zero == "signed":
        return QuantizedWeight(values=(values // 2).to(torch.int8), scales=scales, offsets=None, bits=8)
    if zero == "table":
        return QuantizedWeight(values=values, scales=scales, offsets=None, bits=4, table=tuple(range(-127, 113, 15)))
    points = torch.randint(0, 2**bits, scales.shape, generator=generator) if zero == "offsets" else 2 ** (bits - 1)
    return QuantizedWeight(values=values, scales=scales, offsets=scales * points, bits=bits)
