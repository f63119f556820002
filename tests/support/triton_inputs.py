"""What tests of Triton kernels draw: on a GPU where there is one, else on the CPU, for Triton's interpreter.

The interpreter truncates floats to bfloat16, where a GPU rounds them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_INTERPRETED = DEVICE.type == "cpu"
# once, at the end, relative to the value
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7 if IS_INTERPRETED else 2**-8, torch.float16: 2**-11}


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """From N(0, scale^2)."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE, dtype)


def strided(rows: Tensor, padding: int) -> Tensor:
    """The same rows, `padding` NaN elements behind each: nothing may read or write there."""
    wide = torch.full((rows.shape[0], rows.shape[1] + padding), math.nan, dtype=rows.dtype, device=rows.device)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


def padding_of(rows: Tensor) -> Tensor:
    """What `strided` has put behind the rows."""
    assert rows._base is not None
    return rows._base[:, rows.shape[1] :]


def assert_close(ours: Tensor, truth: Tensor) -> None:
    """Relative to the larger of the value and its row's mean magnitude: a sum may cancel."""
    least = 2**-24 if ours.dtype == torch.float16 else 1e-30
    magnitude = torch.maximum(truth.abs(), truth.abs().mean(dim=-1, keepdim=True))
    assert ((ours.double() - truth).abs() <= ROUNDING[ours.dtype] * 1.01 * magnitude + least).all()
