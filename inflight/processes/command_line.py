"""What `ps` shows of this process: the kernel reads the command line from the process's memory, so it is overwritten there."""

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path


def show_title(title: str) -> None:
    """Replace this process's arguments from `sys.argv[1]` on by `title`."""
    start, end = _addresses()
    arguments = ctypes.string_at(start, end - start)
    offset = arguments.find(sys.argv[1].encode())
    if offset >= 0:
        _write(title.encode(), start + offset, end)


def show_command(command: Sequence[str]) -> None:
    """Replace the whole command line. What does not fit is cut off."""
    _write("\0".join(command).encode(), *_addresses())


def _addresses() -> tuple[int, int]:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc(5)


def _write(text: bytes, start: int, end: int) -> None:
    room = end - start
    ctypes.memmove(start, text[: room - 1].ljust(room, b"\0"), room)
