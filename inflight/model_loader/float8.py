"""`dequantize_float8`: weights in float8_e4m3fn, times their scales, in the engine's dtype.

Each result is the exact product, rounded once. A product of float32 that is rounded again to bfloat16 may differ from this
in the last bit, if the first rounding gives a number in the middle between two of bfloat16. Only a scale decides whether this
can happen, because the fractions of float8 are eighths: so eight products for each scale find the few rows that need care.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NAN_BITS = 127  # without the sign; all other bytes are numbers
LARGEST = 448.0
_ROWS_AT_ONCE = 128  # that are computed together: they stay in the processor's cache
_EXPONENT = 2.0**8  # between float16 and float8_e4m3fn with the same bits of exponent and fraction
_FLOAT16_EXPONENT_OF_SIGN = ~(1 << 14)  # the bit of float16 that a shift has filled with the sign
_BELOW_FLOAT32 = 2**29 - 1  # the bits of a float64's fraction that a float32 does not have


@dataclass(frozen=True)
class Scales:
    """The scales of a weight [num_rows, num_columns].

    Attributes:
        grid: float32 [rows of blocks, columns of blocks], finite.
        block: how many rows and columns of the weight have the same scale.
    """

    grid: Tensor
    block: tuple[int, int]


def dequantize_float8(
    values: Tensor, scales: Scales, dtype: torch.dtype, *, first_row: int = 0, first_column: int = 0
) -> Tensor:
    """Returns `values` times their scales, in `dtype`.

    values: float8_e4m3fn [rows, columns], a part of a weight that begins at row `first_row` and column `first_column` of it.
    They may begin and end inside of blocks.
    """
    num_rows, num_columns = values.shape
    block_rows, block_columns = scales.block
    column_blocks = torch.arange(first_column, first_column + num_columns, dtype=torch.int64, device="cpu")
    column_blocks //= block_columns
    result = torch.empty(num_rows, num_columns, dtype=dtype, device="cpu")
    start = 0
    while start < num_rows:
        row = first_row + start
        stop = min(num_rows, start + _ROWS_AT_ONCE)
        if block_rows > 1:  # not beyond the block, so that all rows have the same scales
            stop = min(stop, start + block_rows - row % block_rows)
            found = scales.grid[row // block_rows][None]
        else:
            found = scales.grid[row : row + stop - start]
        needs_care = dtype == torch.float16 or (dtype == torch.bfloat16 and _may_round_twice(found))
        if found.shape[1] > 1:
            found = found[:, column_blocks]
        part = _as_float32(values[start:stop])
        result[start:stop] = _to_odd(part.double() * found) if needs_care else part.mul_(found)
        start = stop
    return result


def first_nan(values: Tensor) -> tuple[int, int] | None:
    """The row and column of the first NaN in values, float8_e4m3fn [rows, columns]."""
    for start in range(0, len(values), _ROWS_AT_ONCE):
        bits = values[start : start + _ROWS_AT_ONCE].view(torch.uint8) & NAN_BITS
        if int(bits.amax()) == NAN_BITS:
            row, column = (int(index) for index in (bits == NAN_BITS).nonzero()[0])
            return start + row, column
    return None


def _as_float32(values: Tensor) -> Tensor:
    """The same numbers. float16 has the same fields with more bits, so the conversion is a shift; torch's own takes ten times
    as long."""
    bits = values.view(torch.int8).to(torch.int16)  # the sign fills the upper byte
    bits = bits.bitwise_left_shift_(7).bitwise_and_(_FLOAT16_EXPONENT_OF_SIGN)
    return bits.view(torch.float16).float().mul_(_EXPONENT)


def _may_round_twice(scales: Tensor) -> bool:
    """Whether rounding to float32 brings a product of one of these scales into the middle between two of bfloat16."""
    fractions = torch.arange(8, 16, dtype=torch.float32, device="cpu")
    exact = scales[..., None].double() * fractions
    rounded = exact.float()
    is_middle = (rounded.view(torch.int32) & 0xFFFF) == 0x8000
    return bool((is_middle & (rounded.double() != exact)).any())


def _to_odd(exact: Tensor) -> Tensor:
    """float64 -> float32, rounded towards zero, but with the last bit set if something was lost. Such a number is rounded to a
    shorter dtype as `exact` is."""
    bits = exact.view(torch.int64)
    lost = (bits & _BELOW_FLOAT32) != 0
    kept = (bits & ~_BELOW_FLOAT32) | (lost.long() << 29)
    return kept.view(torch.float64).float()
