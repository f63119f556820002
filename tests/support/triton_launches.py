"""Notes how Triton would compile the kernels that its interpreter runs."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

Specialization = tuple[tuple[str, object], ...]


class Launches:
    """Kernels that were launched since this object was made: `seen` has their names with their specializations.

    A GPU compiles a kernel anew for each new specialization: the dtype of a tensor and whether its address is a multiple of 16,
    whether an integer is 1, a multiple of 16 or longer than 32 bits, and the value of each constant.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: set[tuple[str, Specialization]] = set()
        run = InterpretedFunction.run

        def noting(kernel: Any, *args: Any, grid: Any, warmup: Any, **kwargs: Any) -> object:
            given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
            self.seen.add((kernel.__name__, _specialization(kernel, given)))
            return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

        monkeypatch.setattr(InterpretedFunction, "run", noting)


def _specialization(kernel: Any, given: dict[str, Any]) -> Specialization:
    return tuple((name, _kind(kernel, name, value)) for name, value in sorted(given.items()))


def _kind(kernel: Any, name: str, value: object) -> object:
    is_free = name in (kernel.kwargs["do_not_specialize"] or ())
    if isinstance(value, Tensor):
        return value.dtype, is_free or value.data_ptr() % 16 == 0
    is_constant = "constexpr" in str(kernel.fn.__annotations__.get(name, "")) or name not in kernel.arg_names
    if is_constant or value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value >= 2**31, is_free or value == 1, is_free or value % 16 == 0
    return type(value)
