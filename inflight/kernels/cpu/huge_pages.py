"""`HugePages`: memory for packed weights."""

import mmap

import torch
from torch import Tensor

from inflight.device.host_memory import advise_huge_pages

_HUGE_PAGE = 2 << 20
_CHUNK = 256 << 20
_LINE = 64


class HugePages:
    """Allocates memory for packed weights in large mappings of huge pages. A mapping exists until the last tensor in it is
    deleted."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used = 0

    def allocate(self, num_bytes: int) -> Tensor:
        """Returns a zeroed tensor, uint8 [num_bytes], aligned to 64 bytes. Pages that are never written take no memory."""
        start = -(-self._used // _LINE) * _LINE
        if start + num_bytes > len(self._chunk):
            self._chunk = _map(max(num_bytes, _CHUNK))
            start = 0
        self._used = start + num_bytes
        return self._chunk[start : self._used]


def _map(num_bytes: int) -> Tensor:
    pages = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise_huge_pages(pages)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _HUGE_PAGE :]
