"""MXFP4, a format of the OCP Microscaling Formats specification (v1.0): a weight is one of sixteen numbers, times a scale.

A group is 32 neighbouring weights of a row. Its scale is a power of two.
"""

import torch
from torch import Tensor

from inflight.kernels.quantized_weight import QuantizedWeight

GROUP_SIZE = 32
BITS = 4  # of a weight in memory, without scales
MOST_EXPONENT = 248  # with larger ones the integers below become infinite; 255 means that the scale is NaN
_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # the sixteen numbers, times two


def mxfp4_weight(indices: Tensor, exponents: Tensor) -> QuantizedWeight:
    """Makes weight[n, k] = number[indices[n, k]] * 2 ** (exponents[n, k // 32] - 127), exactly.

    Args:
        indices: uint8 [rows, columns], below 16.
        exponents: uint8 [rows, columns / 32], at most `MOST_EXPONENT`.
    """
    return QuantizedWeight(values=indices, scales=_powers_of_two(exponents), offsets=None, bits=4, table=_TWICE)


def _powers_of_two(exponents: Tensor) -> Tensor:
    """uint8 -> float32, 2 ** (exponent - 128): half a scale, because the integers are twice the numbers. The result is made of
    its bits. For exponents below 2 it is a subnormal number."""
    exponent = exponents.int()
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), exponent - 1 << 23)
    return bits.view(torch.float32)
