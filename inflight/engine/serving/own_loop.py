"""`OwnLoop`: the event loop and the process to which an `AsyncLLM` belongs, and what ends with it.

The `AsyncLLM` may be used only there. Its end has four cases:

    its loop runs here                 `close` ends connections and processes as tasks of the loop
    its loop runs in another thread    `close` is called on that loop, and awaited here
    its loop has ended, or is stopped  a thread ends the processes
    this process was forked            nothing is done: connections and processes belong to the parent

If nobody refers to the `AsyncLLM` any more, the same happens without a call of `close`. For that, nothing that the loop keeps
refers to it: the engines' connections know `Replicas` and `RunningRequests` only.
"""

import asyncio
import os
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from inflight.engine.process.remote_replica import Keeper
from inflight.engine.serving.replicas import Replicas
from inflight.errors import EngineClosedError, EngineError
from inflight.processes.object_end import close_in_thread


class OwnLoop:
    """Made on the event loop.

    Args:
        owner: the `AsyncLLM`.
        replicas: its connections.
        keepers: the owners of its engines.
    """

    def __init__(self, owner: object, replicas: Replicas, keepers: Sequence[Keeper]) -> None:
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._replicas = replicas
        self._keepers = keepers
        self._ending: asyncio.Task[None] | None = None
        self._last_reference = weakref.finalize(owner, self._record_dropped)
        self._last_reference.atexit = False

    @property
    def is_running_here(self) -> bool:
        return _running_loop() is self._loop

    def check(self) -> None:
        """
        Raises:
            EngineClosedError: this process was forked, or the loop has ended.
            EngineError: another loop runs here, or none.
        """
        if self.is_running_here:
            return
        if os.getpid() != self._pid:
            raise EngineClosedError(
                "this AsyncLLM belongs to the process from which this one was forked; make a new one"
            )
        if self._loop.is_closed():
            raise EngineClosedError(
                "this AsyncLLM belongs to an event loop that has ended; make it and use it within one asyncio.run"
            )
        raise EngineError(
            "this AsyncLLM belongs to another event loop; call it there, for example with "
            "asyncio.run_coroutine_threadsafe, or make another one here"
        )

    async def end(self) -> None:
        """End connections and processes. If this is cancelled, a thread ends the processes."""
        try:
            await end_keepers(self._keepers, self._replicas.close)
        finally:
            self._last_reference.detach()

    async def end_from_elsewhere(self, close: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """End them from another loop. `close`: to be called on the own loop, if it runs. Returns False in a forked process."""
        if os.getpid() != self._pid:
            return False
        if self._loop.is_running():
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(close(), self._loop))
        elif self._last_reference.detach() is not None:
            self._end_later()
            await asyncio.to_thread(_abandon, self._keepers)
        return True

    def _record_dropped(self) -> None:
        """Nobody refers to the owner any more. A garbage collection may call this in any thread."""
        if os.getpid() != self._pid:
            return
        is_running = self._loop.is_running()
        self._end_later()
        if not is_running:
            close_in_thread(lambda: _abandon(self._keepers))

    def _end_later(self) -> None:
        """Let the loop do what is left to do, if it runs now or later."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin_end)

    def _begin_end(self) -> None:
        for keeper in self._keepers:
            keeper.stop()
        self._ending = self._loop.create_task(self.end())


async def end_keepers(keepers: Sequence[Keeper], before: Callable[[], Awaitable[None]] | None = None) -> None:
    """Call `before`, and close the keepers. If this is cancelled, a thread ends the processes."""
    try:
        if before is not None:
            await before()
        await asyncio.gather(*(keeper.close() for keeper in keepers))
    except BaseException:
        for keeper in keepers:
            keeper.stop()
        close_in_thread(lambda: _abandon(keepers))
        raise


def _abandon(keepers: Sequence[Keeper]) -> None:
    for keeper in keepers:
        keeper.abandon()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
