"""`FewerThreads`: a model that transformers computes leaves a core to a busy program that computes beside it.

torch divides an operation among all threads of its pool, and waits for each of them. If another program takes the core of one
thread, every operation waits until this thread has its core again, some milliseconds later. Inflight's own models do not wait
like this, because one parallel region is a whole step (kernels/cpu/team.h). For transformers' code the remedy is one thread
less: the operating system moves the other program to the core that became free.

    threads    2 ─────────── 1 ─────────────────────── 2 ───────    (on two cores)
    neighbour          comes     computes        leaves
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch

from inflight.device.base import Device
from inflight.device.core_waiting import core_of, idle_seconds, waited_seconds
from inflight.kernels.cpu.library import bind_threads
from inflight.kernels.cpu.recording import KernelLibrary
from inflight.worker.core_sharing import LeaderPlace

logger = logging.getLogger(__name__)

DECISION_SECONDS = 0.1  # the shortest time between two decisions; a window is the time from one decision to the next
WAITED = 0.25  # a thread that waits for its core for more than this share of a window has a busy neighbour
ROOM = 0.5  # if the rank's cores together were idle for this share of a window, there is room for one more thread
MOST_PATIENCE = 16  # windows
PAUSE_SECONDS = 0.2  # after a pause of this length, the next step begins with as many threads as cores were free


class ComputeThreads:
    """The threads of a rank's OpenMP pool, of which some may be left out.

    Attributes:
        ids: of the threads that exist; the first one is the leader. OpenMP ends threads that are left out, and starts new ones.
        cores: the core of each thread.
    """

    def __init__(self, device: Device, kernels: KernelLibrary, ids: list[int], cores: Sequence[int]) -> None:
        self._device = device
        self._kernels = kernels
        self.ids, self.cores = ids, cores

    def use(self, num_threads: int) -> None:
        """Later steps compute with the first `num_threads` threads."""
        self._device.submit(lambda: self._use(num_threads))

    def _use(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        if num_threads == 1:
            return  # the other threads sleep until they are needed again
        before = thread_ids()
        bind_threads(self._kernels, self.cores[:num_threads])
        os.sched_setaffinity(0, self.cores)  # the leader may use all of them
        now = thread_ids()
        self.ids[:] = [each for each in self.ids if each in now] + sorted(now - before)


class FewerThreads(LeaderPlace):
    """Decides with how many threads a rank computes: with all of them, or with fewer, but not with fewer than half. Half is a
    fair share of the cores if as many other programs compute. Steps may end in one thread and begin in another one.

    If the cores were idle, one more thread is tried. If this thread was too many, the next attempt comes after twice as many
    windows, up to MOST_PATIENCE. So attempts cost little where cores are idle for other reasons, such as serial parts of steps.

    After a pause the first step already leaves out as many threads as cores were busy in the pause. Without this, a long
    prompt would be computed at a fifth of the speed before the first decision.

    Args:
        threads: all of them compute at the beginning.
        waited_seconds: how long a thread has waited for a core since it began.
        core_of, idle_seconds, clock: as in `LeaderPlace`.
    """

    def __init__(
        self,
        threads: ComputeThreads,
        waited_seconds: Callable[[int], float] = waited_seconds,
        core_of: Callable[[int], int] = core_of,
        idle_seconds: Callable[[int], float] = idle_seconds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(threads.ids[0], threads.cores[0], threads.cores, core_of, idle_seconds, clock)
        self._threads = threads
        self._waited_seconds = waited_seconds
        self.num_threads = len(threads.cores)
        self._fewest = self.num_threads - self.num_threads // 2
        # an attempt is a thread more, until a window has passed in which it did not wait
        self._is_attempt = False
        self._patience = 1
        self._num_idle_windows = 0
        self._lock = threading.Lock()
        self._last_end = math.inf  # when the last step ended
        self._start = clock()
        self._waited, self._idle = self._read()

    def begin(self) -> None:
        with self._lock:
            now = self._clock()
            pause = now - self._last_end
            if pause < PAUSE_SECONDS:
                return
            idle_before = self._idle
            self._start = now
            self._waited, self._idle = self._read()
            num_busy = round(len(self._threads.cores) - (self._idle - idle_before) / pause)
            num_threads = max(self._fewest, len(self._threads.cores) - max(0, num_busy))
            if num_threads != self.num_threads:
                self._use(num_threads, is_attempt=num_threads > self.num_threads)

    def update(self) -> None:
        super().update()
        with self._lock:
            self._last_end = self._clock()
            self._decide(self._last_end)

    def _decide(self, now: float) -> None:
        seconds = now - self._start
        if seconds < DECISION_SECONDS:
            return
        waited_before, idle_before = self._waited, self._idle
        self._start = now
        self._waited, self._idle = self._read()
        waited = max(total - waited_before.get(thread, total) for thread, total in self._waited.items())
        if waited > WAITED * seconds and self.num_threads > self._fewest:
            self._patience = min(2 * self._patience, MOST_PATIENCE) if self._is_attempt else 1
            self._use(self.num_threads - 1, is_attempt=False)
        elif self.num_threads < len(self._threads.cores):
            has_room = self._idle - idle_before >= ROOM * seconds
            self._num_idle_windows = self._num_idle_windows + 1 if has_room else 0
            if self._num_idle_windows >= self._patience:
                self._use(self.num_threads + 1, is_attempt=True)
        else:
            self._is_attempt = False

    def _use(self, num_threads: int, *, is_attempt: bool) -> None:
        logger.debug("computing with %d of %d threads", num_threads, len(self._threads.cores))
        self.num_threads = num_threads
        self._is_attempt = is_attempt
        self._num_idle_windows = 0
        self._threads.use(num_threads)

    def _read(self) -> tuple[dict[int, float], float]:
        waited = {thread: self._waited_seconds(thread) for thread in list(self._threads.ids)}
        return waited, sum(map(self._idle_seconds, self._threads.cores))


def thread_ids() -> set[int]:
    """Of all threads of this process."""
    return {int(name) for name in os.listdir("/proc/self/task")}
