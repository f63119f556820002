"""`LoadingThreads`: while another program computes on the same cores, one thread reads the weights.

torch divides an operation among all threads of its pool, and waits for each of them. Unpacking and packing a quantized model
takes tens of thousands of operations of about a millisecond. If other programs take a core, each operation waits some
milliseconds until the thread of this core runs again, and meanwhile the other threads compute nothing, but use their cores.

    threads    2 ────────────── 1 ─────────────────────── 2
               first layer       all layers after it      the model is loaded
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from inflight.device.core_waiting import waited_seconds

WINDOW_SECONDS = 0.1  # the shortest time over which the waiting is judged
WAITED = 0.25  # if threads waited for a core for more than this share of a window, other programs use the cores


def threads_waited() -> float:
    """How many seconds the threads of this process, all together, were ready to run without getting a core. A thread that has
    ended no more counts."""
    return sum(waited_seconds(int(thread_id)) for thread_id in os.listdir("/proc/self/task"))


class LoadingThreads:
    """Sets the number of torch's threads in the calling thread, while `watched` lasts. `waited` and `clock`: see
    `threads_waited` and `time.monotonic`."""

    def __init__(
        self, waited: Callable[[], float] = threads_waited, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._waited = waited
        self._clock = clock
        self._window = (0.0, 0.0)  # when it began, and how long the threads had waited then

    @contextmanager
    def watched(self) -> Iterator[None]:
        before = torch.get_num_threads()
        self._window = self._clock(), self._waited()
        try:
            yield
        finally:
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)

    def look(self) -> None:
        """Called before each part of the model is read."""
        if torch.get_num_threads() == 1:
            return
        start, waited_before = self._window
        now = self._clock()
        if now - start < WINDOW_SECONDS:
            return
        waited = self._waited()
        if waited - waited_before > WAITED * (now - start):
            torch.set_num_threads(1)
        self._window = now, waited
