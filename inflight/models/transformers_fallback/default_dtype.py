"""`DefaultDtype`: a dtype in place of torch's default dtype, for the code of transformers, in one thread.

transformers makes tensors without naming their dtype. They get torch's default dtype, which is one for the process: it is the
host program's, and other threads may change it at any moment.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_FLOATS = (  # these give floats unless a dtype is named
    *(torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.eye, torch.linspace, torch.logspace),
    *(torch.hann_window, torch.hamming_window, torch.blackman_window, torch.bartlett_window, torch.kaiser_window),
)
_BY_VALUES = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.full, torch.arange, torch.range)
_CONVERSIONS = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16"})


class DefaultDtype(TorchFunctionMode):
    """Inside, tensors are made as after `torch.set_default_dtype(dtype)`. Only `torch.get_default_dtype` does not see it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: torch's own
        kwargs = kwargs or {}
        if kwargs.get("dtype") is not None or any(isinstance(each, torch.dtype) for each in args):
            return func(*args, **kwargs)
        if func in _FLOATS:
            return func(*args, **{**kwargs, "dtype": self._dtype})
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or not result.is_floating_point() or _has_floats(args, kwargs):
            return result
        if func in _BY_VALUES:
            return func(*args, **{**kwargs, "dtype": self._dtype})
        if getattr(func, "__name__", "") in _CONVERSIONS or not any(isinstance(each, Tensor) for each in args):
            return result
        if func is torch.where:  # a choice between numbers
            numbers = (torch.tensor(each, dtype=self._dtype, device=result.device) for each in args[1:])
            return func(args[0], *numbers, **kwargs)
        # An operation on integers whose result is floats, like a division: torch converts its inputs to the default dtype.
        return func(*(each.to(self._dtype) if isinstance(each, Tensor) else each for each in args), **kwargs)


def _has_floats(args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    """Whether an argument has a dtype of its own that is one of floats: a tensor or an array of numpy."""
    given = [*args, *kwargs.values()]
    inner = [each for outer in given for each in (outer if isinstance(outer, (list, tuple)) else (outer,))]
    dtypes = [getattr(each, "dtype", None) for each in inner]
    return any(
        each.is_floating_point if isinstance(each, torch.dtype) else getattr(each, "kind", "") == "f" for each in dtypes
    )


def float32_by_default() -> AbstractContextManager[object]:
    """Inside, the default dtype is float32, as in a program that has not changed it. It costs nothing if it is float32."""
    if torch.get_default_dtype() == torch.float32:
        return nullcontext()
    return DefaultDtype(torch.float32)
