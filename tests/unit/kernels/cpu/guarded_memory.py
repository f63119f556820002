"""Tensors beside a page that nothing may touch: whoever reads or writes outside such a tensor ends its process with SIGSEGV."""

from __future__ import annotations

import ctypes
import math
import mmap
from typing import Any, Literal

import torch
from torch import Tensor

Side = Literal["behind", "before"]
_PROT_NONE = 0
_empty = torch.empty  # the real one: kernel_calls.py replaces that of torch by `GuardedMemory.empty`


class GuardedMemory:
    """Allocates tensors. Each has a mapping of its own, which exists until the last view of the tensor is deleted.

    Args:
        side: "behind": the tensor ends where the forbidden page begins. "before": it begins where the page ends. None: there
            are no forbidden pages, and torch allocates the memory.
    """

    def __init__(self, side: Side | None) -> None:
        self._side = side
        self._protect = ctypes.CDLL(None, use_errno=True).mprotect
        self._protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def empty(self, *shape: Any, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        """Has the arguments of `torch.empty` that the wrappers of the kernels use. shape: numbers, or one tuple of them."""
        assert device == "cpu"
        sizes: tuple[int, ...] = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        count = math.prod(sizes)
        if self._side is None or count == 0:
            return _empty(sizes, dtype=dtype)
        page, num_bytes = mmap.PAGESIZE, count * dtype.itemsize
        size = -(-num_bytes // page) * page
        memory = mmap.mmap(-1, page + size)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        forbidden, first = (start + size, size - num_bytes) if self._side == "behind" else (start, page)
        if self._protect(forbidden, page, _PROT_NONE) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=first).view(sizes)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.empty(*shape, dtype=dtype).zero_()

    def copy(self, tensor: Tensor) -> Tensor:
        return self.empty(*tensor.shape, dtype=tensor.dtype).copy_(tensor)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.empty(*shape, dtype=dtype).normal_()

    def allocate(self, num_bytes: int) -> Tensor:
        """As `HugePages.allocate`."""
        return self.zeros(num_bytes, dtype=torch.uint8)
