"""What a process has open, as the kernel says it."""

from __future__ import annotations

import contextlib
import gc
import os


def open_descriptors(pid: int) -> dict[int, str]:
    """What each descriptor of the process stands for: a path, "socket:[INODE]", "pipe:[INODE]" and so on.

    The process runs meanwhile: a descriptor that it closes between the listing and the look at it is left out. The same
    is true of the one with which this process reads the listing.
    """
    found = {}
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[int(descriptor)] = os.readlink(f"/proc/{pid}/fd/{descriptor}")
    return found


def num_descriptors() -> int:
    """How many this process has open, without those that stand for something in /proc: an executor's thread opens such a
    file for a moment whenever it looks at a worker's process. What earlier tests have left to the garbage collector is
    closed first, so that nothing of it is closed between two counts."""
    gc.collect()
    return sum(not path.startswith("/proc/") for path in open_descriptors(os.getpid()).values())
