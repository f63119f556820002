"""`RequestState`: a request as the front end has it: its completions so far, and what its caller is to see of them."""

from __future__ import annotations

from enum import Enum, auto

from inflight.engine.completion import Completion
from inflight.engine.input_processor import ProcessedRequest
from inflight.metrics.observer import FinishedRequest
from inflight.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


class RequestOutputKind(Enum):
    """CUMULATIVE: all so far, whenever something is new. DELTA: what is new, of the completions that have something new.
    FINAL_ONLY: all, once, at the end; the only one whose cost is linear without the caller joining pieces.
    """

    CUMULATIVE = auto()
    DELTA = auto()
    FINAL_ONLY = auto()


class RequestState:
    """A request and its completions, in the order of their index. What has been added is seen by `take_output` alone, so what
    is not taken for a while comes in one.

    Attributes:
        completions: in the order of their index.
        num_unfinished: completions that have not ended.
        error: of the completion that failed last; `engine_failed` if the engine did, and not the request.
        finished_time: when the last completion ended; 0.0 while one runs.
    """

    def __init__(self, request: ProcessedRequest, kind: RequestOutputKind, completions: list[Completion]) -> None:
        self.request = request
        self.completions = completions
        self.num_unfinished = len(completions)
        self.error = ""
        self.engine_failed = False
        self.finished_time = 0.0
        self.num_cached_tokens = 0
        self.first_scheduled_time = 0.0
        self.first_token_time: float | None = None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if request.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
        self._kind = kind

    @property
    def finished(self) -> bool:
        return self.num_unfinished == 0

    @property
    def has_output(self) -> bool:
        """Whether its caller is to see what changed; else he waits for the end."""
        return self._kind is not RequestOutputKind.FINAL_ONLY or self.finished

    def take_output(self) -> RequestOutput | None:
        """What the caller is to see now; None if that is nothing. A delta is moved out: the next one begins behind it."""
        if not self.has_output:
            return None
        outputs: list[CompletionOutput]
        if self._kind is RequestOutputKind.DELTA:
            outputs = [completion.take_delta() for completion in self.completions if completion.has_news]
            if not outputs:
                return None
        else:
            outputs = [completion.cumulative() for completion in self.completions]
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=outputs,
            prompt_logprobs=self._visible_prompt_logprobs(),
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
            error=self.error,
            engine_failed=self.engine_failed,
        )

    def _visible_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """All of them, or None while some are missing; a stream gets them once."""
        found = self.prompt_logprobs
        if found is None or len(found) < len(self.request.prompt_token_ids):
            return None
        if self._kind is RequestOutputKind.DELTA:
            self.prompt_logprobs = None
        return found

    @property
    def metrics(self) -> RequestMetrics | None:
        """Known when the request has ended; None too if it was aborted before its first token."""
        if not self.finished or self.first_token_time is None:
            return None
        return RequestMetrics(
            arrival_time=self.request.arrival_time,
            first_scheduled_time=self.first_scheduled_time,
            first_token_time=self.first_token_time,
            finished_time=self.finished_time,
        )

    def summary(self) -> FinishedRequest:
        """For observers, once it has ended."""
        return FinishedRequest(
            request_id=self.request.request_id,
            params=self.request.params,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=self.num_cached_tokens,
            num_generation_tokens=sum(completion.num_tokens for completion in self.completions),
            finish_reasons=tuple(str(completion.finish_reason) for completion in self.completions),
            arrival_time=self.request.arrival_time,
            finished_time=self.finished_time,
            metrics=self.metrics,
            trace_headers=self.request.trace_headers,
        )
