"""`Readiness`: whether the engine really makes steps. If it is idle, it is asked for one token.

After a failed step the engine is not ready until a step has succeeded.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from inflight.errors import EngineError
from inflight.interface.request import EngineCoreOutput, FinishReason
from inflight.interface.statistics import SchedulerStats

FRESH_SECONDS = 10.0  # so long does a step say that the engine is ready
NO_STEP = -1  # the `step_id` of an engine that has made none


class Readiness:
    """On the event loop. `step_budget`: seconds after which a step has failed; an engine that is busy may be silent so long."""

    def __init__(self, step_budget: float) -> None:
        self._step_budget = step_budget
        self._last_step = -math.inf  # when the engine was last heard to have made one
        self._step_id = NO_STEP
        self._failure = ""  # error of the last failed step; "" once a step has succeeded
        self._canary_id = ""
        self._canary: asyncio.Future[None] | None = None

    def note(self, outputs: Sequence[EngineCoreOutput], stats: SchedulerStats | None) -> None:
        """What the engine sent: outputs, of requests or of the canary, and its state, which tells of steps without any."""
        has_stepped = any(output.finish_reason is not FinishReason.ERROR for output in outputs)
        if stats is not None:
            has_stepped |= stats.step_id != self._step_id
            self._step_id = stats.step_id
        failures = [output.error for output in outputs if output.engine_failed]
        if has_stepped:
            self._last_step = time.monotonic()
            self._failure = ""
        if failures:  # if steps and failures came together, their order is unknown: assume the failure was last
            self._failure = failures[-1]
            self._last_step = -math.inf
        canary = self._canary
        for output in outputs if canary is not None else ():
            if output.request_id == self._canary_id and output.finish_reason is not None:
                assert canary is not None
                self._canary = None
                if canary.done():
                    return
                if output.finish_reason is FinishReason.ERROR:
                    self._fail(canary, EngineError(f"the engine makes no steps: {output.error}"))
                else:
                    canary.set_result(None)
                return

    def end(self, error: EngineError) -> None:
        """The engine is gone."""
        if self._canary is not None and not self._canary.done():
            self._fail(self._canary, error)

    @staticmethod
    def _fail(canary: asyncio.Future[None], error: EngineError) -> None:
        canary.set_exception(error)
        canary.exception()  # nobody may be waiting any more

    async def check(self, start_canary: Callable[[], str], busy_since: float | None) -> None:
        """
        Args:
            start_canary: sends a request of one token to the engine, and returns the id that its output will have.
            busy_since: when the first of the requests that are there came: their steps say it, and a canary would wait behind
                them. None: there are none.

        Raises:
            EngineError: no step is made.
        """
        now = time.monotonic()
        if now - self._last_step < FRESH_SECONDS:
            return
        if busy_since is not None and self._failure:
            raise EngineError(f"the last step failed: {self._failure}")
        if busy_since is not None:
            silent = now - max(self._last_step, busy_since)
            if silent > self._step_budget:
                raise EngineError(f"requests are there, and the engine has made no step for {silent:.0f} s")
            return
        if self._canary is None:
            self._canary_id = start_canary()
            self._canary = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._step_budget):
                await asyncio.shield(self._canary)
        except TimeoutError:
            raise EngineError(f"the engine has made no step within {self._step_budget:g} s") from None
