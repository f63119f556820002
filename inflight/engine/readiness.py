"""`Readiness`: whether the engine makes steps, and not only lives. An idle engine is asked for one token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from inflight.errors import EngineError
from inflight.interface.request import EngineCoreOutput, FinishReason

FRESH_SECONDS = 10.0  # so long does a step say that the engine is ready


class Readiness:
    """On the event loop. `step_budget`: seconds after which a step has failed; an engine that is busy may be silent so long."""

    def __init__(self, step_budget: float) -> None:
        self._step_budget = step_budget
        self._last_output = time.monotonic()
        self._has_output = False
        self._canary_id = ""
        self._canary: asyncio.Future[None] | None = None

    def note(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Outputs that the engine sent, of requests or of the canary."""
        if not outputs:
            return
        self._last_output, self._has_output = time.monotonic(), True
        canary = self._canary
        for output in outputs if canary is not None else ():
            if output.request_id == self._canary_id and output.finish_reason is not None:
                assert canary is not None
                self._canary = None
                if canary.done():
                    return
                if output.finish_reason is FinishReason.ERROR:
                    canary.set_exception(EngineError(f"the engine makes no steps: {output.error}"))
                else:
                    canary.set_result(None)
                return

    def end(self, error: EngineError) -> None:
        """The engine is gone."""
        if self._canary is not None and not self._canary.done():
            self._canary.set_exception(error)
            self._canary.exception()  # nobody may be waiting

    async def check(self, start_canary: Callable[[], str], *, is_busy: bool) -> None:
        """
        Args:
            start_canary: sends a request of one token to the engine, and returns the id that its output will have.
            is_busy: requests are there: their steps say it, and a canary would wait behind them.

        Raises:
            EngineError: no step is made.
        """
        age = time.monotonic() - self._last_output
        if age < FRESH_SECONDS and self._has_output:
            return
        if is_busy:
            if age > self._step_budget:
                raise EngineError(f"requests are there, and the engine has made no step for {age:.0f} s")
            return
        if self._canary is None:
            self._canary = asyncio.get_running_loop().create_future()
            self._canary_id = start_canary()
        try:
            async with asyncio.timeout(self._step_budget):
                await asyncio.shield(self._canary)
        except TimeoutError:
            raise EngineError(f"the engine has made no step within {self._step_budget:g} s") from None
