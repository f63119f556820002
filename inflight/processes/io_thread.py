"""`IoThread`: a thread with an asyncio event loop. An executor reads sockets, runs timers and watches processes there;
`ReplicatedEngine` runs an `AsyncLLM` there."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class IoThread:
    """Owns the loop and the thread. Callbacks run in the thread and must not wait. asyncio logs exceptions that they raise.

    Attributes:
        loop: only callbacks in this thread may call methods of the loop. Other threads use the methods of this class.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    @property
    def is_closed(self) -> bool:
        """Whether the thread has ended, or belongs to a process from which this one was forked."""
        return not self._thread.is_alive()

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run `callback` in the thread, after all earlier callbacks. After `stop` the callback is dropped."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(callback)

    def run(self, function: Callable[[], T]) -> T:
        """Run `function` in the thread and wait for it. Returns its value, or raises its exception. Only for other threads."""

        async def call() -> T:
            return function()

        return self.run_coroutine(call())

    def run_coroutine(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` in the thread and wait for it, like `run`. If the caller is interrupted, it is cancelled.

        Raises:
            RuntimeError: the thread does not run.
        """
        if self.is_closed:
            coroutine.close()  # otherwise Python warns that it was never awaited
            raise RuntimeError("the thread does not run")
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the thread after all earlier callbacks. Waits for its end, unless it is called in this thread. Idempotent."""
        self.call_soon(self.loop.stop)
        if self._thread.ident is None:
            self.loop.close()
        elif not self.is_current:
            self._thread.join()

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()
