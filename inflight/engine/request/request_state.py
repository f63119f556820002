"""`RequestState`: a request in the front end, with the text, tokens and log-probabilities of its completions so far."""

import time
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto

from inflight.engine.request.answer_parts import AnswerParts
from inflight.engine.request.detokenizer import Detokenizer
from inflight.engine.request.processed import ProcessedRequest
from inflight.engine.request.token_logprobs import logprobs_dicts
from inflight.errors import ErrorKind
from inflight.interface.events import Event, join_deltas
from inflight.interface.request import (
    MIN_PROGRESS_TOKENS,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    LogprobsColumns,
)
from inflight.metrics.observer import FinishedRequest
from inflight.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from inflight.tokenizer.stop_strings import StopStrings
from inflight.tokenizer.tokenizer import Tokenizer


class RequestOutputKind(Enum):
    """What an output of a request contains.

    CUMULATIVE: each output contains everything so far. The total cost is quadratic in the number of outputs.
    DELTA: each output contains only the completions that have changed, and of these only what is new since the last output.
    FINAL_ONLY: there is one output, at the end, with everything.
    """

    CUMULATIVE = auto()
    DELTA = auto()
    FINAL_ONLY = auto()


class RequestState:
    """A request and its completions, ordered by index. Changes are collected until `take_output`.

    Attributes:
        engine: the index of the engine that has the request; -1 before it is given to one.
        was_sent: whether the request was sent to the present process of this engine.
        given_time: when the request was given to its engine, or lost with it, as a time of `time.monotonic()`.
        num_unfinished: the number of completions that have not ended.
        error: why a completion failed; "" if none has failed. If several have failed, why the last one failed.
        error_kind: what the cause of `error` was.
        error_param: the parameter that was wrong; "" if it is not known.
        finished_time: when the last completion ended; 0.0 while one is running.
        makes_text: otherwise the request wants only what is made of its prompt.
        answers: collects what comes of the request's parts; None if it has none.
    """

    def __init__(self, request: ProcessedRequest, kind: RequestOutputKind, tokenizer: Tokenizer | None) -> None:
        self.request = request
        strings = request.params.stop_strings
        stop_strings = StopStrings(strings) if strings else None
        self.completions = [
            CompletionState(index, tokenizer, request, stop_strings) for index in range(len(request.sequences))
        ]
        self.num_unfinished = len(self.completions)
        self.engine, self.was_sent = -1, False
        self.given_time = time.monotonic()
        self.error = ""
        self.error_kind = ErrorKind.REQUEST
        self.error_param = ""
        self.finished_time = 0.0
        self.num_cached_tokens = 0
        self.first_scheduled_time = 0.0
        self.first_token_time: float | None = None
        self.makes_text = request.sequences[0].sampling.max_tokens > 0
        parts = request.sequences[0].parts
        self.answers = AnswerParts(parts, request, tokenizer) if parts else None
        self._kind = kind

    @property
    def finished(self) -> bool:
        return self.num_unfinished == 0

    @property
    def has_output(self) -> bool:
        """Whether the caller may get an output now. With FINAL_ONLY this is only at the end."""
        return self._kind is not RequestOutputKind.FINAL_ONLY or self.finished

    def take_output(self) -> RequestOutput | None:
        """Returns the output that the caller must get now, or None. With DELTA, later outputs do not contain its content."""
        if not self.has_output:
            return None
        is_delta = self._kind is RequestOutputKind.DELTA
        outputs = [each.output(is_delta=is_delta) for each in self.completions if each.has_news or not is_delta]
        if not outputs:
            return None
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=outputs,
            parts={} if self.answers is None else self.answers.take(keep=not is_delta),
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
            error=self.error,
            error_kind=self.error_kind,
            error_param=self.error_param,
        )

    @property
    def num_losses(self) -> int:
        """How many engine cores in a row were lost with this request, without progress between the losses."""
        return max((each.num_losses for each in self.completions if each.finish_reason is None), default=0)

    def count_loss(self) -> None:
        """Count that an engine core was lost with this request."""
        for completion in self.completions:
            has_progressed = completion.num_tokens - completion.num_tokens_at_loss >= MIN_PROGRESS_TOKENS
            completion.num_losses = 1 if has_progressed else completion.num_losses + 1
            completion.num_tokens_at_loss = completion.num_tokens

    def resumed_sequences(self) -> tuple[EngineCoreRequest, ...]:
        """Returns the sequences that have not ended, each with its tokens so far. Another engine core that gets them goes on
        after these tokens."""
        return tuple(
            completion.resumed(sequence)
            for sequence, completion in zip(self.request.sequences, self.completions, strict=True)
            if completion.finish_reason is None
        )

    @property
    def metrics(self) -> RequestMetrics | None:
        """The request's times. None until the request has ended, and also None if it ended before its first token or without
        its vector."""
        if not self.finished or not self.first_scheduled_time:
            return None
        return RequestMetrics(
            arrival_time=self.request.arrival_time,
            first_scheduled_time=self.first_scheduled_time,
            first_token_time=self.first_token_time,
            finished_time=self.finished_time,
        )

    def summary(self) -> FinishedRequest:
        """Returns the record that observers get when the request has ended."""
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
            makes_text=self.makes_text,
        )


class CompletionState:
    """One completion of a request: its tokens, text and log-probabilities.

    Attributes:
        has_news: whether something was added that no DELTA output has contained yet.
        last_token_time: when the newest token came, as a time of `time.monotonic()`; None before the first token. The output
            processor sets it.
        num_losses: how many engine cores were lost with the completion, without progress between them (`Quarantine`).
        num_tokens_at_loss: `num_tokens` at the last of these losses.
        parts: those of the sequence, as they are after the results so far.
    """

    def __init__(
        self, index: int, tokenizer: Tokenizer | None, request: ProcessedRequest, stop_strings: StopStrings | None
    ) -> None:
        params = request.params
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.has_news = False
        self.last_token_time: float | None = None
        self.num_losses = self.num_tokens_at_loss = 0
        self.parts = request.sequences[index].parts
        self._stop_reason: str | int | None = None
        self._tokenizer = tokenizer
        self._num_logprobs = params.logprobs or 0
        parser = None if request.make_parser is None else request.make_parser()
        self._is_parsed = parser is not None
        self._detokenizer = Detokenizer(tokenizer, params, request.prompt_token_ids, stop_strings, parser)
        self._text = ""
        self._all_events: list[Event] = []  # all events so far; empty if outputs are DELTA outputs
        self._token_ids: list[int] = []
        self._num_taken = 0  # how many tokens were in DELTA outputs
        self._num_reasoning_taken = 0  # how many reasoning tokens were in DELTA outputs
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far."""
        return len(self._token_ids)

    def resumed(self, sequence: EngineCoreRequest) -> EngineCoreRequest:
        """Returns the sequence with what has happened to it. If nothing has, this is `sequence` itself."""
        if not (self._token_ids or self.num_losses) and self.parts == sequence.parts:
            return sequence
        emitted = tuple(self._token_ids)
        return replace(sequence, emitted_token_ids=emitted, num_losses=self.num_losses, parts=self.parts)

    def add(self, output: EngineCoreOutput) -> None:
        """Add the tokens of `output`. If a token completes a stop string, the completion ends, and later tokens are dropped.
        The completion also ends if `output` has a finish reason. If EOS or a stop token ended the sequence in the core, this
        token is counted. The text contains it only with `include_stop_str_in_output`.
        """
        assert self.finish_reason is None
        token_ids = output.new_token_ids
        ends_in_stop_token = output.finish_reason is FinishReason.STOP and bool(token_ids)
        text_ids = token_ids[:-1] if ends_in_stop_token else token_ids
        if (count := self._detokenizer.push(text_ids)) is not None:
            self._append(token_ids[:count], output.logprobs)
            self.finish(FinishReason.STOP, self._detokenizer.stop_string)
            return
        self._append(token_ids, output.logprobs)
        if output.finish_reason is not None:
            self.finish(output.finish_reason, output.stop_reason, token_ids[-1] if ends_in_stop_token else None)

    def finish(
        self, finish_reason: FinishReason, stop_reason: str | int | None = None, end_token_id: int | None = None
    ) -> None:
        self._detokenizer.finish(end_token_id, is_cut=finish_reason is not FinishReason.STOP)
        self.finish_reason = finish_reason
        self._stop_reason = stop_reason
        self.has_news = True

    def fail(self) -> None:
        """End the completion with an error. The text so far remains."""
        self.finish_reason = FinishReason.ERROR
        self.has_news = True

    def output(self, *, is_delta: bool) -> CompletionOutput:
        """Returns everything so far. With `is_delta`, returns only what was added since the last call with `is_delta`."""
        self._text += self._detokenizer.take()
        text, token_ids, logprobs = self._text, self._token_ids[self._num_taken :], self._logprobs
        if is_delta:
            self.has_news = False
            self._text, self._num_taken, self._logprobs = "", self.num_tokens, None if logprobs is None else []
        else:
            logprobs = None if logprobs is None else list(logprobs)
        events, num_reasoning = self._take_parsed(is_delta=is_delta) if self._is_parsed else (None, 0)
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=None if logprobs is None else self._cumulative_logprob,
            logprobs=logprobs,
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self._stop_reason,
            events=events,
            num_reasoning_tokens=num_reasoning,
        )

    def _take_parsed(self, *, is_delta: bool) -> tuple[list[Event], int]:
        """Returns the events and the number of reasoning tokens: all of them, or with `is_delta` only the new ones."""
        new, count = self._detokenizer.take_events(), self._detokenizer.num_reasoning_tokens
        if not is_delta:
            self._all_events = join_deltas([*self._all_events, *new])
            return self._all_events, count
        before, self._num_reasoning_taken = self._num_reasoning_taken, count
        return new, count - before

    def _append(self, token_ids: Sequence[int], columns: LogprobsColumns | None) -> None:
        self._token_ids += token_ids
        self.has_news |= bool(token_ids)
        if self._logprobs is None or not token_ids:
            return
        assert columns is not None and len(columns.ranks) >= len(token_ids), "the core left out log-probabilities"
        rows = logprobs_dicts(columns.rows(0, len(token_ids)), self._num_logprobs, self._tokenizer)
        self._logprobs += rows
        for token_id, row in zip(token_ids, rows, strict=True):
            self._cumulative_logprob += row[token_id].logprob
