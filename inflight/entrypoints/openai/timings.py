"""`Timer`: the `timings` of an answer, with the names and meanings that llama.cpp's server has given them."""

import time

from inflight.entrypoints.openai.bodies import Timings
from inflight.outputs import RequestOutput


class Timer:
    """Of one chat. Made when its request has been given to the engine."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._first: float | None = None

    def of_output(self, output: RequestOutput, completion_tokens: int) -> Timings:
        """The times until this output, with which the answer has so many tokens.

        `prompt_ms` includes the wait for the first step until the request has ended, because only then the engine's own times
        are known. `predicted_ms` begins with the first token, which counts in `predicted_n`.
        """
        now = time.monotonic()
        first = now if self._first is None else self._first
        begin = self._begin
        metrics = output.metrics
        if metrics is not None and metrics.first_token_time is not None:
            begin = metrics.first_scheduled_time
            first = metrics.first_token_time
            now = metrics.finished_time
        prompt_ms = 1000 * max(first - begin, 0.0)
        predicted_ms = 1000 * max(now - first, 0.0)
        computed = len(output.prompt_token_ids) - output.num_cached_tokens
        return {
            "cache_n": output.num_cached_tokens,
            "prompt_n": computed,
            "prompt_ms": round(prompt_ms, 3),
            "prompt_per_token_ms": _ratio(prompt_ms, computed),
            "prompt_per_second": _ratio(1000 * computed, prompt_ms),
            "predicted_n": completion_tokens,
            "predicted_ms": round(predicted_ms, 3),
            "predicted_per_token_ms": _ratio(predicted_ms, completion_tokens),
            "predicted_per_second": _ratio(1000 * completion_tokens, predicted_ms),
        }

    def record_output(self) -> None:
        """To be called with each output that has tokens."""
        if self._first is None:
            self._first = time.monotonic()


def _ratio(number: float, of: float) -> float:
    """0 if there is nothing to divide by: JSON has no infinity."""
    return round(number / of, 3) if of else 0.0
