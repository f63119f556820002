"""`Reactor`: one thread that waits for file descriptors, timers and calls from other threads, all at once.

Owns a selector, an event descriptor that wakes it, and its thread. It sleeps in the kernel until there is something to do.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
Callback = Callable[[], None]


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Reactor:
    """Callbacks run in the reactor's thread and must not wait. If a callback raises, the error is logged, and its descriptor is
    no longer watched."""

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._wake_up)
        self._calls: deque[Callback] = deque()
        self._timers: list[tuple[float, int, Callback]] = []
        self._timer_ids = itertools.count()
        self._lock = threading.Lock()  # of `_calls` and `_is_open`
        self._is_open = True
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    # -- from any thread -------------------------------------------------------------------------------------------

    def call_soon(self, callback: Callback) -> None:
        """Run `callback` in the thread, after those given before. Dropped after `stop`."""
        with self._lock:
            if self._is_open:
                self._calls.append(callback)
                os.eventfd_write(self._wake_fd, 1)

    def run(self, function: Callable[[], T]) -> T:
        """Run `function` in the thread, from another one; returns its value, or raises what it raises."""
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # it is the caller's
                future.set_exception(error)

        self.call_soon(call)
        return future.result()

    def stop(self) -> None:
        """End the thread after the calls given before. Waits for it, unless it is the thread that asks. Idempotent."""
        self.call_soon(self._stop)
        if self._thread.ident is None:
            self._close()
        elif not self.is_current_thread:
            self._thread.join()

    # -- in the reactor's thread only --------------------------------------------------------------------------------

    def call_later(self, seconds: float, callback: Callback) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._timer_ids), callback))

    def watch(self, fileobj: HasFileno | int, events: int, callback: Callback) -> None:
        """Call `callback` whenever one of `events` (`selectors.EVENT_...`) is there; replaces an earlier watch."""
        if fileobj in self._selector.get_map():
            self._selector.modify(fileobj, events, callback)
        else:
            self._selector.register(fileobj, events, callback)

    def unwatch(self, fileobj: HasFileno | int) -> None:
        """To be called before the descriptor is closed. Idempotent."""
        if self._is_open and fileobj in self._selector.get_map():
            self._selector.unregister(fileobj)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                timeout = max(self._timers[0][0] - time.monotonic(), 0.0) if self._timers else None
                for key, _ in self._selector.select(timeout):
                    if self._selector.get_map().get(key.fd) is key:  # not unwatched by a callback before it
                        self._call(key.data, key.fileobj)
                while self._timers and self._timers[0][0] <= time.monotonic():
                    self._call(heapq.heappop(self._timers)[2])
        finally:
            self._close()

    def _call(self, callback: Callback, fileobj: HasFileno | int | None = None) -> None:
        try:
            callback()
        except Exception:
            logger.exception("a callback of %s failed", self._thread.name)
            if fileobj is not None and fileobj != self._wake_fd:
                self.unwatch(fileobj)

    def _wake_up(self) -> None:
        os.eventfd_read(self._wake_fd)
        for _ in range(len(self._calls)):
            self._call(self._calls.popleft())

    def _stop(self) -> None:
        self._stopping = True

    def _close(self) -> None:
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._selector.close()
                os.close(self._wake_fd)
