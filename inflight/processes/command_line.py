"""What `ps` shows of this process: the kernel reads the command line from the process's memory, so it is overwritten there."""

import ctypes
import sys
from pathlib import Path


def show_title(title: str) -> None:
    """Replace this process's arguments from `sys.argv[1]` on by `title`."""
    start, end = address_range()
    arguments = ctypes.string_at(start, end - start)
    offset = arguments.find(sys.argv[1].encode())
    if offset >= 0:
        overwrite(title.encode(), start + offset, end)


def address_range() -> tuple[int, int]:
    """The addresses `[start, end)` of the command line."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc(5)


def overwrite(text: bytes, start: int, end: int) -> None:
    """What does not fit is cut off."""
    room = end - start
    ctypes.memmove(start, text[: room - 1].ljust(room, b"\0"), room)
