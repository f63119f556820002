"""Runs requests on an `LLM` step by step, and says how long each step took, or looks at the device in some of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from benchmarks.gpu.trace import Trace, record
from inflight import LLM, SamplingParams


class Driver:
    """Greedy requests of given lengths, past every end token; no text is made. One caller."""

    def __init__(self, llm: LLM, device: str) -> None:
        self.engine = llm.llm_engine
        self._device = device
        self._ids = itertools.count()

    def add(self, prompts: Sequence[list[int]], output_lens: Sequence[int]) -> list[str]:
        """The ids of the requests."""
        request_ids = []
        for prompt, output_len in zip(prompts, output_lens, strict=True):
            params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
            request_ids.append(f"figure-{next(self._ids)}")
            self.engine.add_request(request_ids[-1], {"prompt_token_ids": prompt}, params)
        return request_ids

    def run(self, prompts: Sequence[list[int]], output_lens: Sequence[int]) -> list[float]:
        """Seconds from the start, and then from one step's results to the next step's, up to the last; their sum is the whole
        time.

        Raises:
            RuntimeError: a request ended early.
        """
        start = time.perf_counter()
        self.add(prompts, output_lens)
        periods, num_tokens = [], 0
        while self.engine.has_unfinished_requests():
            num_tokens += sum(len(output.outputs[0].token_ids) for output in self.engine.step())
            now = time.perf_counter()
            periods.append(now - start)
            start = now
        if num_tokens != sum(output_lens):
            raise RuntimeError(f"{num_tokens} tokens came of requests for {sum(output_lens)}")
        return periods

    def times_over_long_contexts(
        self, prompts: Sequence[list[int]], beside: list[int], num_steps: int
    ) -> tuple[list[float], float]:
        """Seconds of steps in which all `prompts` decode, and of the longest step while the prompt `beside` is computed."""
        config = self.engine.executor.config.scheduler
        before = sum(map(len, prompts)) // config.max_num_batched_tokens + len(prompts) + 8
        request_ids = self.add(prompts, [before + 2 * num_steps + 16] * len(prompts))
        self._steps(before)
        alone = self._timed(num_steps)
        request_ids += self.add([beside], [1])
        longest = max(self._timed(4))
        self._end(request_ids)
        return alone, longest

    def trace_decoding(self, prompts: Sequence[list[int]], num_steps: int) -> Trace:
        """The device in `num_steps` steps in which all the requests decode."""
        before = len(prompts) + 8  # so many steps are more than the prompts take
        request_ids = self.add(prompts, [before + 2 * num_steps] * len(prompts))
        self._steps(before)
        trace = record(self._device, lambda: self._steps(num_steps))
        self._end(request_ids)
        return trace

    def _end(self, request_ids: Sequence[str]) -> None:
        self.engine.abort_requests(list(request_ids))
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self._steps(2)  # of those that were in flight

    def _timed(self, count: int) -> list[float]:
        periods = []
        for _ in range(count):
            start = time.perf_counter()
            self.engine.step()
            periods.append(time.perf_counter() - start)
        return periods

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()


def steady(periods: Sequence[float]) -> Sequence[float]:
    """The half in the middle: all requests decode, prompts are behind them, and none has ended."""
    quarter = len(periods) // 4
    return periods[quarter : len(periods) - quarter]
