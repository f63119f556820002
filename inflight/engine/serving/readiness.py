"""`ReadinessCheck`: finds out whether the engine makes steps. For this, an idle engine must compute one token, the *canary*.

After a failed step the engine is not ready until a step has succeeded.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from inflight.errors import EngineError, ErrorKind
from inflight.interface.request import EngineCoreOutput, FinishReason
from inflight.interface.statistics import SchedulerStats

FRESH_SECONDS = 10.0  # how long after a step the engine counts as ready


class ReadinessCheck:
    """Only the event loop's thread may use it. `step_budget` is how many seconds a step may take. For so long a busy engine may
    send nothing."""

    def __init__(self, step_budget: float) -> None:
        self._step_budget = step_budget
        self._last_step = -math.inf  # when the engine last reported a step
        self._step_id = -1  # the step id in the newest report
        self._failure = ""  # the error of the last step if it failed, otherwise ""
        self._canary_id = ""
        self._canary: asyncio.Future[None] | None = None

    def record(self, outputs: Sequence[EngineCoreOutput], stats: SchedulerStats | None) -> None:
        """Note what the engine has sent: outputs of requests and of the canary, and sometimes its state (`stats`). If the step
        id in `stats` has changed, the engine has made steps, even if there are no outputs."""
        has_stepped = any(output.finish_reason is not FinishReason.ERROR for output in outputs)
        if stats is not None:
            has_stepped |= stats.step_id != self._step_id
            self._step_id = stats.step_id
        failures = [output.error for output in outputs if output.error_kind is ErrorKind.ENGINE]
        if has_stepped:
            self._last_step = time.monotonic()
            self._failure = ""
        if failures:  # if steps and failures came together, their order is not known: assume that the failure came last
            self._failure = failures[-1]
            self._last_step = -math.inf
        if self._canary is None:
            return
        for output in outputs:
            if output.request_id == self._canary_id and output.finish_reason is not None:
                failed = output.finish_reason is FinishReason.ERROR
                self.end(EngineError(f"the engine makes no steps: {output.error}") if failed else None)

    def end(self, error: EngineError | None) -> None:
        """End the check with the canary. `error` is None if the engine makes steps, otherwise the reason why it makes none."""
        canary, self._canary = self._canary, None
        if canary is None or canary.done():
            return
        if error is None:
            canary.set_result(None)
        else:
            canary.set_exception(error)
            canary.exception()  # otherwise asyncio would log the exception if nobody waits for it any more

    async def check(self, start_canary: Callable[[], str], busy_since: float | None) -> None:
        """Check that the engine makes steps.

        Args:
            start_canary: sends a request for one token to the engine, and returns the request id of its output.
            busy_since: since when there have been requests; None if there are none. If there are requests, no canary is sent:
                the steps of the requests show whether the engine is ready.

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
                raise EngineError(f"there are requests, but the engine has made no step for {silent:.0f} s")
            return
        if self._canary is None:
            self._canary_id = start_canary()
            self._canary = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._step_budget):
                await asyncio.shield(self._canary)
        except TimeoutError:
            raise EngineError(f"the engine has made no step within {self._step_budget:g} s") from None
