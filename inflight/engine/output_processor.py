"""`OutputProcessor`: what the engine core commits, made into `RequestOutput`s.

Owns the front end's half of every request: its text so far, tokens, log-probabilities. It alone finds stop strings. What it
makes does not depend on how a request's tokens were cut into `EngineCoreOutput`s. Side effects of `process`:

    1. tokens go to their completion, until one completes a stop string: the rest is dropped, not counted
    2. completions ended that way are named in `requests_to_abort`; what the core still sends of them is passed over
    3. a request whose completions have all ended is forgotten
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from inflight.engine.completion import Completion, logprobs_dicts
from inflight.engine.input_processor import ProcessedRequest
from inflight.engine.stop_strings import StopStrings
from inflight.errors import InvalidRequestError
from inflight.interface.request import EngineCoreOutput, FinishReason
from inflight.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from inflight.tokenizer.tokenizer import Tokenizer


class RequestOutputKind(Enum):
    """CUMULATIVE: all so far, whenever something is new. DELTA: what is new, of the completions that have something new.
    FINAL_ONLY: all, once, at the end; the only one whose cost is linear without the caller joining pieces.
    """

    CUMULATIVE = auto()
    DELTA = auto()
    FINAL_ONLY = auto()


@dataclass(slots=True, kw_only=True)
class ProcessedOutputs:
    """`requests_to_abort`: ids of children to abort in the core."""

    request_outputs: list[RequestOutput] = field(default_factory=list)
    requests_to_abort: list[str] = field(default_factory=list)


class OutputProcessor:
    """Not thread-safe: the front end's loop drives it. `tokenizer` None leaves texts empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _RequestState] = {}
        self._children: dict[str, tuple[_RequestState, Completion]] = {}

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def add_request(self, request: ProcessedRequest, kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY) -> None:
        """Expect outputs of the request's children. Call it before they go to the engine core.

        Raises:
            InvalidRequestError: a request with this id is still running.
        """
        if request.request_id in self._requests:
            raise InvalidRequestError(f"a request with the id {request.request_id!r} is still running; use another id")
        strings = request.params.stop_strings
        stop_strings = StopStrings(strings) if strings else None
        completions = [
            Completion(index, self._tokenizer, request.params, request.prompt_token_ids, stop_strings)
            for index in range(len(request.children))
        ]
        state = _RequestState(request, kind, completions)
        self._requests[request.request_id] = state
        for child, completion in zip(request.children, completions, strict=True):
            self._children[child.request_id] = (state, completion)

    def process(self, outputs: Sequence[EngineCoreOutput]) -> ProcessedOutputs:
        """Take in what one or more commits added."""
        now = time.monotonic()
        result = ProcessedOutputs()
        changed: dict[str, _RequestState] = {}
        for output in outputs:
            if output.request_id not in self._children:
                continue  # ended by a stop string or an abort while the core was already ahead
            state, completion = self._children[output.request_id]
            self._add(state, completion, output, now)
            changed[state.request.request_id] = state
            if completion.finish_reason is None:
                continue
            del self._children[output.request_id]
            state.num_unfinished -= 1
            if output.finish_reason is None:
                result.requests_to_abort.append(output.request_id)
            if completion.finish_reason is FinishReason.ERROR:
                state.error = output.error
        self._emit(changed.values(), result, now)
        return result

    def abort(self, request_ids: Iterable[str]) -> ProcessedOutputs:
        """End requests, by the user's ids, as they are. Ids that are unknown, or have ended, are passed over."""
        now = time.monotonic()
        result = ProcessedOutputs()
        aborted = [
            self._requests[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self._requests
        ]
        for state in aborted:
            for child, completion in zip(state.request.children, state.completions, strict=True):
                if completion.finish_reason is None:
                    completion.finish(FinishReason.ABORT)
                    del self._children[child.request_id]
                    state.num_unfinished -= 1
                    result.requests_to_abort.append(child.request_id)
        self._emit(aborted, result, now)
        return result

    def _add(self, state: _RequestState, completion: Completion, output: EngineCoreOutput, now: float) -> None:
        if output.prompt_logprobs is not None and state.prompt_logprobs is not None:
            k = state.request.params.prompt_logprobs or 0
            state.prompt_logprobs += logprobs_dicts(output.prompt_logprobs, k, self._tokenizer)
        if completion.index == 0:
            state.num_cached_tokens = (
                output.num_cached_tokens
            )  # the other children share its prompt, not a user's prefix
        if output.new_token_ids and state.first_token_time is None:
            state.first_scheduled_time, state.first_token_time = output.first_scheduled_time, now
        completion.add(output)

    def _emit(self, changed: Iterable[_RequestState], result: ProcessedOutputs, now: float) -> None:
        for state in changed:
            if state.finished:
                del self._requests[state.request.request_id]
            output = state.make_output(now)
            if output is not None:
                result.request_outputs.append(output)


class _RequestState:
    """A request and its completions, in the order of their index."""

    def __init__(self, request: ProcessedRequest, kind: RequestOutputKind, completions: list[Completion]) -> None:
        self.request = request
        self.completions = completions
        self.num_unfinished = len(completions)
        self.error = ""  # of the completion that failed last
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

    def make_output(self, now: float) -> RequestOutput | None:
        """What the caller is to see now; None if that is nothing."""
        if self._kind is RequestOutputKind.FINAL_ONLY and not self.finished:
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
            metrics=self._metrics(now),
            error=self.error,
        )

    def _visible_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """All of them, or None while some are missing; a stream gets them once."""
        found = self.prompt_logprobs
        if found is None or len(found) < len(self.request.prompt_token_ids):
            return None
        if self._kind is RequestOutputKind.DELTA:
            self.prompt_logprobs = None
        return found

    def _metrics(self, now: float) -> RequestMetrics | None:
        """Known when the request has ended; None too if it was aborted before its first token."""
        if not self.finished or self.first_token_time is None:
            return None
        return RequestMetrics(
            arrival_time=self.request.arrival_time,
            first_scheduled_time=self.first_scheduled_time,
            first_token_time=self.first_token_time,
            finished_time=now,
        )
