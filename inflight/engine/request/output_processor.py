"""`OutputProcessor`: makes `RequestOutput`s from the tokens that the engine core commits.

It owns the front end's state of every request: the text, tokens and log-probabilities so far. Only this class searches for stop
strings. The core computes each completion of a request as a sequence of its own. An `EngineCoreOutput` contains new tokens of
one sequence. The results do not depend on how many outputs the core used to send the tokens. What `update` does:

    1. A completion gets its new tokens. If a token completes a stop string, later tokens are dropped and not counted.
    2. If the tokens of a completion cannot be processed because of a defect, it ends with an error. The others continue.
    3. If a completion has ended in one of these two ways, the core must abort its sequence (`requests_to_abort`). Later outputs
       of this sequence are ignored.
    4. A request is forgotten when all its completions have ended.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from inflight.engine.request.processed import ProcessedRequest
from inflight.engine.request.request_state import CompletionState, RequestOutputKind, RequestState
from inflight.errors import ErrorKind, InvalidRequestError
from inflight.interface.request import EngineCoreOutput, FinishReason
from inflight.metrics.observer import EngineObserver
from inflight.metrics.observers import Observers
from inflight.outputs import RequestOutput
from inflight.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Update:
    """The requests that have changed, and the ids of the sequences that the core must abort."""

    changed: list[RequestState] = field(default_factory=list)
    requests_to_abort: list[str] = field(default_factory=list)

    def take_outputs(self) -> list[RequestOutput]:
        """Returns the outputs that the callers of these requests must get now."""
        return [output for state in self.changed if (output := state.take_output()) is not None]


class OutputProcessor:
    """Not thread-safe. If `tokenizer` is None, all texts are empty. Calls `observers` for new tokens and ended requests."""

    def __init__(self, tokenizer: Tokenizer | None, observers: Sequence[EngineObserver] = ()) -> None:
        self._tokenizer = tokenizer
        self._observers = Observers(observers)
        self._requests: dict[str, RequestState] = {}
        self._sequences: dict[str, tuple[RequestState, CompletionState]] = {}

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def request_ids(self) -> list[str]:
        return list(self._requests)

    def unfinished(self) -> list[RequestState]:
        """Returns the requests that have not ended, in the order in which they were added."""
        return list(self._requests.values())

    def check_ids(self, request_ids: Iterable[str]) -> None:
        """
        Raises:
            InvalidRequestError: a request with one of these ids is still running, or two of these ids are equal.
        """
        seen: set[str] = set()
        for request_id in request_ids:
            if request_id in self._requests or request_id in seen:
                raise InvalidRequestError(f"a request with the id {request_id!r} is still running; use another id")
            seen.add(request_id)

    def add_request(
        self, request: ProcessedRequest, kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    ) -> RequestState:
        """Register a request. Call this before its sequences are sent to the engine core.

        Raises:
            InvalidRequestError: a request with this id is still running.
        """
        self.check_ids([request.request_id])
        state = RequestState(request, kind, self._tokenizer)
        self._requests[request.request_id] = state
        for sequence, completion in zip(request.sequences, state.completions, strict=True):
            self._sequences[sequence.request_id] = (state, completion)
        return state

    def update(self, outputs: Sequence[EngineCoreOutput]) -> Update:
        """Process the outputs of one or more commits."""
        now = time.monotonic()
        result = Update()
        changed: dict[str, RequestState] = {}
        for output in outputs:
            if output.request_id not in self._sequences:
                continue  # the completion has ended here; the core sent this output before it received the abort
            state, completion = self._sequences[output.request_id]
            try:
                self._add(state, completion, output, now)
            except Exception as error:  # a defect
                logger.exception("request %s ends, because its tokens cannot be processed", state.request.request_id)
                completion.fail()
                reason = f"the engine failed: tokens could not be processed: {type(error).__name__}"
                output = replace(output, error=reason, error_kind=ErrorKind.ENGINE)
            changed[state.request.request_id] = state
            if completion.finish_reason is None:
                continue
            del self._sequences[output.request_id]
            state.num_unfinished -= 1
            if output.finish_reason is None:
                result.requests_to_abort.append(output.request_id)
            if completion.finish_reason is FinishReason.ERROR:
                state.error, state.error_kind, state.error_param = output.error, output.error_kind, output.error_param
        result.changed = list(changed.values())
        self._forget_finished(result.changed, now)
        return result

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> Update:
        """End requests. Ids of unknown or ended requests are ignored."""
        result = Update()
        for request_id in dict.fromkeys(request_ids):
            state = self._requests.get(request_id)
            if state is None:
                continue
            result.changed.append(state)
            for sequence, completion in zip(state.request.sequences, state.completions, strict=True):
                if completion.finish_reason is None:
                    try:
                        completion.finish(reason)
                    except Exception:
                        logger.exception("request %s ends without its last text, which cannot be made", request_id)
                        completion.fail()
                    del self._sequences[sequence.request_id]
                    state.num_unfinished -= 1
                    result.requests_to_abort.append(sequence.request_id)
        self._forget_finished(result.changed, time.monotonic())
        return result

    def _add(self, state: RequestState, completion: CompletionState, output: EngineCoreOutput, now: float) -> None:
        if output.parts and state.answers is not None:
            completion.parts = state.answers.add(completion.index, completion.parts, output.parts)
        if completion.index == 0 and not completion.num_tokens:
            # This count is taken only from the first sequence, before its first token. The others find the whole prompt in the
            # cache, but only because the first sequence has computed it. If the first sequence is resumed later on another
            # engine core, it may find a different number of tokens there.
            state.num_cached_tokens = output.num_cached_tokens
        num_before = completion.num_tokens
        completion.add(output)
        num_added = completion.num_tokens - num_before
        if not num_added:
            if output.finish_reason is FinishReason.STOP and not state.makes_text:
                state.first_scheduled_time = state.given_time + output.queue_seconds
            return
        if state.first_token_time is None:
            state.first_scheduled_time = state.given_time + output.queue_seconds
            state.first_token_time = now
            self._observers.first_token(now - state.request.arrival_time)
            num_added -= 1
        elif not num_before:
            self._observers.tokens_generated(1, None)
            num_added -= 1
        if num_added:
            self._observers.tokens_generated(num_added, now - (completion.last_token_time or now))
        completion.last_token_time = now

    def _forget_finished(self, changed: Iterable[RequestState], now: float) -> None:
        for state in changed:
            if state.finished:
                state.finished_time = now
                del self._requests[state.request.request_id]
                self._observers.request_finished(state.summary())
