"""`Backlog`: what came from the engine and has not been taken in. Slices of the event loop take it in.

So one large batch delays nobody; when more comes than can be taken in, it is left in the engine, which merges it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from inflight.engine.core_client import CoreClient
from inflight.interface.request import EngineCoreOutput

logger = logging.getLogger(__name__)

SLICE_SECONDS = 0.001  # of the event loop, for outputs of the engine
SLICE_OUTPUTS = 16  # taken in between two looks at the clock
MAX_BACKLOG = 4096  # outputs here that have not been taken in; what is more stays in the engine


class Backlog:
    """On the event loop.

    Args:
        take_in: called with some outputs, in order. If it raises, what else is here is dropped and the client's stream ends.
    """

    def __init__(self, client: CoreClient, take_in: Callable[[Sequence[EngineCoreOutput]], None]) -> None:
        self._client = client
        self._take_in = take_in
        self._outputs: deque[EngineCoreOutput] = deque()
        self._is_paused = False

    def extend(self, outputs: Sequence[EngineCoreOutput]) -> None:
        was_empty = not self._outputs
        self._outputs.extend(outputs)
        if was_empty:
            self._run()
        if len(self._outputs) > MAX_BACKLOG and not self._is_paused:
            self._is_paused = True
            self._client.pause()

    def finish(self) -> None:
        """Take in all that is here at once: the engine is gone, and nothing more comes."""
        while self._outputs and self._take_some():
            pass

    def _run(self) -> None:
        """One slice."""
        end = time.perf_counter() + SLICE_SECONDS
        while self._outputs:
            if time.perf_counter() > end:
                asyncio.get_running_loop().call_soon(self._run)
                return
            if not self._take_some():
                return
        if self._is_paused:
            self._is_paused = False
            self._client.resume()

    def _take_some(self) -> bool:
        """Take in the oldest outputs, a few; False if that failed, and the client's stream ends."""
        some = [self._outputs.popleft() for _ in range(min(SLICE_OUTPUTS, len(self._outputs)))]
        try:
            self._take_in(some)
        except Exception as error:
            logger.exception("the engine's outputs cannot be taken in")
            self._outputs.clear()
            self._client.end(f"the engine's outputs cannot be taken in: {error!r}")
            return False
        return True
