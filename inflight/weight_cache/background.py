"""`BackgroundWork`: work that can wait until the engine serves, in a thread of low priority."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from inflight.thread_priority import lower_priority

logger = logging.getLogger(__name__)

# Gets a function that says whether the work must end now, and calls it often.
Task = Callable[[Callable[[], bool]], None]
_NICENESS = 10
_POLL_SECONDS = 0.1
_IDLE_SECONDS = 5.0  # if no request comes for so long, the work begins before the first one


class BackgroundWork:
    """The thread starts with `start`, and ends when all tasks are done or with `close`."""

    def __init__(self) -> None:
        self._tasks: list[tuple[Task, Callable[[], bool]]] = []  # with their `is_stopped`
        self._thread: threading.Thread | None = None
        self._ends_at: float | None = None  # on the clock time.monotonic()
        self._is_closing = threading.Event()

    def add(self, task: Task, *, is_for_later_starts: bool) -> None:
        """Call it before `start`. A task that is not for later starts is stopped at once when the engine ends."""
        self._tasks.append((task, self._is_stopped if is_for_later_starts else self._is_closing.is_set))

    def start(self, has_served: Callable[[], bool]) -> None:
        """Runs the tasks as soon as a request was served, or none has come for some seconds. Later calls do nothing."""
        if self._thread is None and self._tasks:
            self._thread = threading.Thread(
                target=self._run, args=(has_served,), name="inflight-background", daemon=True
            )
            self._thread.start()

    def close(self, seconds: float) -> None:
        """Gives the tasks for later starts so many seconds to end, and then stops them."""
        self._ends_at = time.monotonic() + seconds
        self._is_closing.set()
        if self._thread is not None:
            with suppress(RuntimeError):  # the interpreter ends
                self._thread.join()

    def _run(self, has_served: Callable[[], bool]) -> None:
        lower_priority(_NICENESS)
        idle_until = time.monotonic() + _IDLE_SECONDS
        while not has_served() and time.monotonic() < idle_until:
            if self._is_closing.wait(_POLL_SECONDS):
                break
        if not has_served() and self._is_closing.is_set():
            return  # the engine has served no request
        for task, is_stopped in self._tasks:
            try:
                task(is_stopped)
            except Exception:
                logger.exception("work beside serving has failed")
        self._tasks.clear()

    def _is_stopped(self) -> bool:
        return self._ends_at is not None and time.monotonic() > self._ends_at
