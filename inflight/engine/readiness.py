"""`Readiness`: finds out whether the engine makes steps. An idle engine is asked to generate one token, the canary.

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

FRESH_SECONDS = 10.0  # after a step the engine counts as ready for so long


class Readiness:
    """Used by the event loop only. `step_budget`: the seconds that a step may take; a busy engine may send nothing for so
    long."""

    def __init__(self, step_budget: float) -> None:
        self._step_budget = step_budget
        self._last_step = -math.inf  # the time of the engine's last report of a step
        self._step_id = -1  # of the newest report
        self._failure = ""  # error of the last failed step; "" once a step has succeeded
        self._canary_id = ""
        self._canary: asyncio.Future[None] | None = None

    def note(self, outputs: Sequence[EngineCoreOutput], stats: SchedulerStats | None) -> None:
        """Note the outputs of requests or of the canary, and the engine's state if it was sent. The state shows steps without
        outputs."""
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
        if self._canary is None:
            return
        for output in outputs:
            if output.request_id == self._canary_id and output.finish_reason is not None:
                failed = output.finish_reason is FinishReason.ERROR
                self.end(EngineError(f"the engine makes no steps: {output.error}") if failed else None)

    def end(self, error: EngineError | None) -> None:
        """End the canary. `error`: why the engine makes no steps."""
        canary, self._canary = self._canary, None
        if canary is None or canary.done():
            return
        if error is None:
            canary.set_result(None)
        else:
            canary.set_exception(error)
            canary.exception()  # asyncio does not log it if nobody is waiting any more

    async def check(self, start_canary: Callable[[], str], busy_since: float | None) -> None:
        """
        Args:
            start_canary: sends a request of one token to the engine, and returns the id of its output.
            busy_since: the time since which there are requests; None if there are none. The steps of requests show whether the
                engine is ready, and a canary would have to wait behind them.

        Raises:
            EngineError: the engine makes no steps.
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
