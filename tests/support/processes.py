"""Which processes exist, have ended, or are below another one. They need not be children of the test."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from pathlib import Path

from benchmarks.robustness.fault_server import descendants
from tests.support.waits import MOST_SECONDS


def exists(pid: int) -> bool:
    """A zombie does not exist any more: nothing of it is left but its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def have_ended(pids: Iterable[int], seconds: float = MOST_SECONDS) -> bool:
    """Wait until none of them exists any more. Any process may ask, not only the parent."""
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([pidfd], [], [], seconds)[0]:
                return False
        finally:
            os.close(pidfd)
    return True


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children(pid: int) -> list[int]:
    """All processes below `pid`, at any depth, without fork servers."""
    return descendants(pid)[1:]
