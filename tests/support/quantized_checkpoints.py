"""Quantized checkpoints written by hand: plain loops over what each format's documentation says, nothing of the loader's code.

    drawn = draw(random, 96, 64, bits=4, group_size=32)
    tensors = {f"{module}.{suffix}": tensor for suffix, tensor in gptq(drawn).items()}

Scales are small multiples of a power of two, so that every weight is exact in float32, and `drawn.weight()` is the truth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Drawn:
    """weight[n][k] = scales[n][group[k]] * (values[n][k] - zeros[n][group[k]]), values and zeros in [0, 2**bits)."""

    bits: int
    values: np.ndarray  # int64 [rows, columns]
    scales: np.ndarray  # float64 [rows, groups]
    zeros: np.ndarray  # int64 [rows, groups]
    group: np.ndarray  # int64 [columns]

    def weight(self) -> Tensor:
        rows, columns = self.values.shape
        weight = np.empty((rows, columns))
        for n in range(rows):
            for k in range(columns):
                g = self.group[k]
                weight[n, k] = self.scales[n, g] * (self.values[n, k] - self.zeros[n, g])
        return torch.tensor(weight, dtype=torch.float32)


def draw(
    random: np.random.Generator,
    rows: int,
    columns: int,
    *,
    bits: int,
    group_size: int,
    symmetric: bool = False,
    act_order: bool = False,
    lowest: int = 0,
) -> Drawn:
    """`lowest`: the smallest integer stored; 1 makes symmetric ones of 8 bits fit [-127, 127]."""
    groups = -(-columns // group_size)
    middle = 2 ** (bits - 1)
    zeros = np.full((rows, groups), middle) if symmetric else random.integers(0, 2**bits, (rows, groups))
    group = np.arange(columns) // group_size
    values = random.integers(lowest, 2**bits, (rows, columns))
    values[0, :2] = lowest, 2**bits - 1  # the ends of the range are there
    return Drawn(
        bits=bits,
        values=values,
        scales=random.integers(1, 9, (rows, groups)) * 2.0 ** (-4 - bits),
        zeros=zeros,
        group=random.permutation(group) if act_order else group,
    )


def word(numbers: Iterable[int], bits: int) -> int:
    """int32 of up to 32 / bits numbers, the first in the lowest bits."""
    packed = 0
    for position, number in enumerate(numbers):
        packed |= int(number) << (bits * position)
    return packed - 2**32 if packed >= 2**31 else packed


def _pack_down(matrix: np.ndarray, bits: int) -> Tensor:
    """Rows that lie below each other share a word."""
    per_word = 32 // bits
    return torch.tensor(
        [
            [word(matrix[first : first + per_word, column], bits) for column in range(matrix.shape[1])]
            for first in range(0, matrix.shape[0], per_word)
        ],
        dtype=torch.int32,
    )


def _pack_across(matrix: np.ndarray, bits: int) -> Tensor:
    """Columns that lie beside each other share a word."""
    per_word = 32 // bits
    return torch.tensor(
        [[word(row[first : first + per_word], bits) for first in range(0, len(row), per_word)] for row in matrix],
        dtype=torch.int32,
    )


def gptq(drawn: Drawn, *, version: int = 1) -> dict[str, Tensor]:
    stored_zeros = (drawn.zeros.T - (1 if version == 1 else 0)) % 2**drawn.bits
    return {
        "qweight": _pack_down(drawn.values.T, drawn.bits),
        "qzeros": _pack_across(stored_zeros, drawn.bits),
        "scales": torch.tensor(drawn.scales.T.copy(), dtype=torch.float16),
        "g_idx": torch.tensor(drawn.group, dtype=torch.int32),
    }


def awq(drawn: Drawn) -> dict[str, Tensor]:
    def pack(matrix: np.ndarray) -> Tensor:
        return torch.tensor(
            [[word([row[first + i] for i in AWQ_ORDER], 4) for first in range(0, len(row), 8)] for row in matrix],
            dtype=torch.int32,
        )

    return {
        "qweight": pack(drawn.values.T),
        "qzeros": pack(drawn.zeros.T),
        "scales": torch.tensor(drawn.scales.T.copy(), dtype=torch.float16),
    }


def pack_quantized(drawn: Drawn, *, zero_points: str = "packed", act_order: bool = False) -> dict[str, Tensor]:
    """`zero_points`: "packed" as new releases write them, "bytes" as old ones did, "none" for symmetric weights."""
    tensors = {
        "weight_packed": _pack_across(drawn.values, drawn.bits),
        "weight_scale": torch.tensor(drawn.scales, dtype=torch.bfloat16),
        "weight_shape": torch.tensor(drawn.values.shape, dtype=torch.int64),
    }
    if zero_points == "packed":
        tensors["weight_zero_point"] = _pack_down(drawn.zeros, drawn.bits)
    elif zero_points == "bytes":
        tensors["weight_zero_point"] = torch.tensor(drawn.zeros - 2 ** (drawn.bits - 1), dtype=torch.int8)
    if act_order:
        tensors["weight_g_idx"] = torch.tensor(drawn.group, dtype=torch.int32)
    return tensors


def int_quantized(drawn: Drawn, *, scale: str = "column") -> dict[str, Tensor]:
    """int8 in bytes of their own. `scale`: "column" [rows, groups], "vector" [rows], "one" [1] (of the first row)."""
    scales = torch.tensor(drawn.scales, dtype=torch.float32)
    return {
        "weight": torch.tensor(drawn.values - 128, dtype=torch.int8),
        "weight_scale": {"column": scales, "vector": scales[:, 0], "one": scales[0]}[scale].clone(),
    }
