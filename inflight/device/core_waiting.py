"""How long threads wait for a core. Linux counts for each thread how long it was ready to run without getting one."""

import os
from pathlib import Path

SHARED = 0.1  # if threads wait for a core for more than this share of their time, their cores count as shared


def waited_seconds(thread_id: int) -> float:
    """How long a thread of this process was ready to run without getting a core; 0 if the kernel does not count it."""
    try:
        return int(Path(f"/proc/self/task/{thread_id}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def core_of(thread_id: int) -> int:
    """The core on which a thread of this process runs, or ran last."""
    return int(Path(f"/proc/self/task/{thread_id}/stat").read_text().rpartition(")")[2].split()[36])


def idle_seconds(core: int) -> float:
    """How long the core has been idle since the start of the machine, in steps of 10 ms; 0 if this is not known."""
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith(f"cpu{core} "):
            return int(line.split()[4]) / os.sysconf("SC_CLK_TCK")
    return 0.0
