"""`use_huge_pages`: mapped weights in huge pages, while the engine serves.

Reading is some 8 % faster from huge pages. A recent Linux maps a file in huge pages by itself, and all processes share them.
If the file lies in small pages, the weights are copied into huge pages of this process, a piece at a time. Each piece takes
the place of its original by one system call (mremap), at the same addresses: a thread that reads it meanwhile waits for the
call, and then reads the same numbers.
"""

import ctypes
import logging
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from inflight.config.free_memory import available_bytes

logger = logging.getLogger(__name__)

HUGE_PAGE = 2 << 20
_PIECE = 64 << 20
_MADV_POPULATE_READ = 22  # of linux/mman.h, as the two flags of mremap
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_ENOUGH = 0.9  # of the bytes, in huge pages
_SPARE_BYTES = 1 << 30
_FAILED = ctypes.c_void_p(-1).value


def use_huge_pages(content: Tensor, is_stopped: Callable[[], bool]) -> None:
    """
    Args:
        content: uint8 [num_bytes], a private mapping of a file at a multiple of `HUGE_PAGE`, of a multiple of this size. Nobody
            writes to it.
        is_stopped: whether to end before everything is moved; called before each piece.
    """
    _read_in(content)
    if huge_bytes(content) >= _ENOUGH * len(content) or "[never]" in _setting():
        return
    if available_bytes() < len(content) + _SPARE_BYTES:
        logger.info("mapped weights stay in small pages: there is no memory for a copy in huge pages")
        return
    try:
        if move_to_huge_pages(content, is_stopped):
            logger.info("%.1f GB of mapped weights were moved into huge pages", len(content) / 1e9)
    except OSError as error:
        logger.info("mapped weights stay in small pages: %s", error)


def move_to_huge_pages(content: Tensor, is_stopped: Callable[[], bool]) -> bool:
    """As `use_huge_pages`, wherever the content lies. Returns whether everything was moved.

    Raises:
        OSError: the operating system refuses. What was not moved stays as it is.
    """
    library = _c_library()
    for start in range(0, len(content), _PIECE):
        if is_stopped():
            return False
        piece = content[start : start + _PIECE]
        size = len(piece)
        copy = _allocate(library, size)
        ctypes.memmove(copy, piece.data_ptr(), size)  # without the interpreter's lock
        moved = library.mremap(copy, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, piece.data_ptr())
        if moved != piece.data_ptr():
            error = _error("a copy cannot take the place of its original")
            library.munmap(copy, size)
            raise error
    return True


def huge_bytes(content: Tensor) -> int:
    """How many bytes of a mapping lie in huge pages, of a file or not."""
    first = content.data_ptr()
    last = first + len(content)
    found = 0
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            start, _, stop = name.partition("-")
            is_inside = int(start, 16) < last and int(stop, 16) > first
        elif is_inside and name in ("FilePmdMapped:", "AnonHugePages:"):
            found += 1024 * int(values[0])
    return found


def _read_in(content: Tensor) -> None:
    """Reads the file and fills the page table, where the operating system can do this."""
    library = _c_library()
    for start in range(0, len(content), _PIECE):
        piece = content[start : start + _PIECE]
        library.madvise(piece.data_ptr(), len(piece), _MADV_POPULATE_READ)


def _allocate(library: ctypes.CDLL, size: int) -> int:
    """The address of `size` bytes of new memory, at a multiple of `HUGE_PAGE`."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    reserved = library.mmap(None, size + HUGE_PAGE, access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved == _FAILED:
        raise _error("no memory for a copy")
    first: int = -(-reserved // HUGE_PAGE) * HUGE_PAGE
    # This is done now: after the memory in the middle has been moved away, other threads may get its addresses.
    if first > reserved:
        library.munmap(reserved, first - reserved)
    library.munmap(first + size, reserved + HUGE_PAGE - first)
    library.madvise(first, size, mmap.MADV_HUGEPAGE)
    return first


def _setting() -> str:
    try:
        return Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "[never]"


def _c_library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.mmap.restype = library.mremap.restype = pointer
    library.mmap.argtypes = (pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    library.mremap.argtypes = (pointer, size, size, ctypes.c_int, pointer)
    library.madvise.argtypes = (pointer, size, ctypes.c_int)
    library.munmap.argtypes = (pointer, size)
    return library


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what} ({os.strerror(number)})")
