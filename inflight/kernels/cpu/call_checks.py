"""Checks that the tensors of a call fit together, before a C++ kernel gets pointers to them.

If a kernel gets a size, dtype or stride that it does not support, it may write to memory that is not its own. So the wrapper of
each kernel checks its tensors in each call. If they do not fit, Inflight has a defect, and `require` raises `AssertionError`.
It is no `assert` statement, because `python -O` would remove it. limits.py says what sizes a model may have.
"""

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from inflight.kernels.cpu.functions import AttentionStep


def require(fits: bool, needed: str, *given: object) -> None:
    """
    Args:
        fits: whether a call's arguments are what the kernel needs.
        needed: the kernel's name and what it needs, for the message.
        given: the arguments. A kernel gets pointers to the tensors among them.

    Raises:
        AssertionError: they are not, or a tensor is not in the memory of the CPU.
    """
    if not fits or any(isinstance(each, Tensor) and not each.is_cpu for each in given):
        raise AssertionError(f"{needed}, in the memory of the CPU; given: {', '.join(map(_described, given))}")


def _described(given: object) -> str:
    if not isinstance(given, Tensor):
        return str(given)
    dtype = str(given.dtype).removeprefix("torch.")
    return f"{dtype} {list(given.shape)} with strides {list(given.stride())} on {given.device}"


def require_rows(rows: Tensor, num_rows: int) -> None:
    """Requires that each of `rows` (int64 [n], contiguous) is the index of one of `num_rows` rows. It calls no operation of
    torch, because a `Recorder` would see it."""
    if indices := (ctypes.c_int64 * len(rows)).from_address(rows.data_ptr())[:]:
        lowest, highest = min(indices), max(indices)
        require(
            lowest >= 0 and highest < num_rows,
            "rows must exist",
            f"{num_rows} rows, and indices from {lowest} to {highest}",
        )


def require_states(
    states: Tensor,
    offsets: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    step: AttentionStep,
) -> None:
    """Requires that a state has room for tensors that begin at `offsets`, and a block for the states of `step`. `states`: uint8
    [num_blocks, bytes]."""
    ends = [
        start + math.prod(shape) * dtype.itemsize for start, shape, dtype in zip(offsets, shapes, dtypes, strict=False)
    ]
    limits = *offsets[1 : len(ends)], step.state_bytes
    fits = states.dtype == torch.uint8 and states.stride(1) == 1 and offsets[0] == 0
    fits = fits and all(end <= limit for end, limit in zip(ends, limits, strict=True))
    fits = fits and step.num_states > 0 and step.num_states * step.state_bytes <= states.shape[1]
    given = states, offsets, shapes, step.state_bytes, step.num_states
    require(fits, "a recurrent layer needs states that lie one behind the other in a block", *given)
