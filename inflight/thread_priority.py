"""`lower_priority`: other threads of the process come before this one, if all cores are busy."""

import os
import sys
import threading
from contextlib import suppress


def lower_priority(niceness: int) -> None:
    """Lower the operating system's priority of the calling thread for as long as it lives. Where that is not possible, do
    nothing: only Linux has priorities of threads; elsewhere it would be the priority of the whole process.

    Args:
        niceness: how much nicer than now, 0 (no change) to 19, as in nice(2).
    """
    if niceness and sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)
