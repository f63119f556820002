"""`ChatPresenter`: writes the answers of /v1/chat/completions."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

from inflight.entrypoints.http.logprobs import PositionLogprobs, chat_logprobs
from inflight.entrypoints.http.presenter import AnswerTo
from inflight.entrypoints.openai.bodies import (
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    FinishReason,
    FunctionCallDelta,
    MessageDelta,
)
from inflight.entrypoints.openai.chunk_presenter import ChunkPresenter, finish_reason_of
from inflight.entrypoints.openai.logprobs import shown_parts
from inflight.entrypoints.openai.timings import Timer
from inflight.entrypoints.written_answer import written_answer
from inflight.interface.events import ContentDelta, Event, ReasoningDelta, ToolCallStart
from inflight.outputs import CompletionOutput, RequestOutput


class ChatPresenter(ChunkPresenter):
    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"

    def __init__(self, to: AnswerTo) -> None:
        super().__init__(to)
        # choice index -> whether a call has begun; set at the choice's first output
        self._has_calls: dict[int, bool] = {}
        self._timer = Timer()

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[bytes]:
        self._usage.add(prompt_index, output)
        self.has_begun = True
        self._timer.record_output()
        self._timings = None
        if output.finished or self._presentation.timings_per_token:
            self._timings = self._timer.of_output(output, self._usage.completion_tokens)
        events: list[bytes] = []
        for choice in output.outputs:
            if choice.index not in self._has_calls:
                self._has_calls[choice.index] = False
                events.append(self._role_chunk(choice.index, output))
            if choice.events and _has_call(choice.events):
                self._has_calls[choice.index] = True
            events += self._choice_chunks(choice)
        return events

    def body(self, outputs: Sequence[RequestOutput]) -> bytes:
        (output,) = outputs
        more: dict[str, Any] = {}  # Any: JSON
        if self._presentation.return_token_ids:
            more["prompt_token_ids"] = output.prompt_token_ids
        more |= shown_parts(self._presentation.parts, output)
        return self._body([self._choice(choice) for choice in output.outputs], outputs, **more)

    def progress(self, total: int, cached: int, processed: int, milliseconds: float) -> bytes:
        choice: ChatChunkChoice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}
        progress = {"total": total, "cache": cached, "processed": processed, "time_ms": round(milliseconds, 3)}
        return self._chunk(choice, prompt_progress=progress)

    # -- a stream ------------------------------------------------------------------------------------------------------

    def _role_chunk(self, index: int, output: RequestOutput) -> bytes:
        delta: MessageDelta = {"role": "assistant", "content": ""}
        choice: ChatChunkChoice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self._presentation.return_token_ids:
            return self._chunk(choice, prompt_token_ids=output.prompt_token_ids)
        return self._chunk(choice)

    def _choice_chunks(self, choice: CompletionOutput) -> list[bytes]:
        """The chunks for one output: one for each event of the parser. The first of these chunks has the log-probabilities and
        token ids of the output. The last chunk of the last output has the finish reason. If there is no event, but one of these
        values, the chunk that carries it is empty otherwise."""
        finished = choice.finish_reason is not None
        deltas: list[MessageDelta] = []
        if choice.events is not None:
            deltas = [delta for event in choice.events if (delta := self._delta(event))]
        elif choice.text or (choice.token_ids and not finished):  # even a token without text gets a chunk
            deltas = [{"content": choice.text}]
        logprobs = self._logprobs(choice.logprobs) if choice.logprobs else None
        shows_ids = self._presentation.return_token_ids and bool(choice.token_ids)
        if not deltas and (finished or logprobs is not None or shows_ids):
            deltas = [{}]
        chunks = []
        for i, delta in enumerate(deltas):
            shown: ChatChunkChoice = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
            if i == 0:
                shown["logprobs"] = logprobs
                if shows_ids:
                    shown["token_ids"] = choice.token_ids
            if finished and i == len(deltas) - 1:
                shown["finish_reason"] = self._finish_reason(choice, self._has_calls[choice.index])
                shown["stop_reason"] = choice.stop_reason
            chunks.append(self._chunk(shown))
        return chunks

    def _delta(self, event: Event) -> MessageDelta:
        """The delta of an event; empty for reasoning that the answer leaves out."""
        if isinstance(event, ContentDelta):
            return {"content": event.text}
        if isinstance(event, ReasoningDelta):
            delta: MessageDelta = {}
            for name in self._presentation.reasoning_fields:
                delta[name] = event.text
            return delta
        if self._presentation.has_older_calls:
            if isinstance(event, ToolCallStart):
                return {"function_call": {"name": event.name, "arguments": ""}}
            return {"function_call": {"arguments": event.text}}
        if isinstance(event, ToolCallStart):
            function: FunctionCallDelta = {"name": event.name, "arguments": ""}
            return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}

    # -- both ----------------------------------------------------------------------------------------------------------

    def _logprobs(self, rows: Sequence[PositionLogprobs]) -> ChatLogprobs | None:
        if self._top_logprobs is None:
            return None
        as_ids = self._presentation.tokens_as_ids
        return {"content": chat_logprobs(rows, self._top_logprobs, self._tokenizer, as_ids=as_ids), "refusal": None}

    def _choice(self, choice: CompletionOutput) -> ChatChoice:
        events = [ContentDelta(choice.text)] if choice.events is None else choice.events
        finish_reason = cast(
            "FinishReason", self._finish_reason(choice, _has_call(events))
        )  # never None for a whole answer
        found: ChatChoice = {
            "index": choice.index,
            "message": self._message(events),
            "logprobs": self._logprobs(choice.logprobs or ()),
            "finish_reason": finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._presentation.return_token_ids:
            found["token_ids"] = choice.token_ids
        return found

    def _message(self, events: Iterable[Event]) -> AnswerMessage:
        shown = self._presentation
        answer = written_answer(events)
        message = answer.as_message(shown.reasoning_fields, has_older_calls=shown.has_older_calls)
        content = None if answer.calls and not answer.content else answer.content
        return cast("AnswerMessage", {**message, "content": content, "refusal": None})

    def _finish_reason(self, choice: CompletionOutput, has_call: bool) -> FinishReason | None:
        if choice.finish_reason != "stop" or not has_call:
            return finish_reason_of(choice)
        if self._presentation.has_older_calls:
            return "function_call"
        return "tool_calls"


def _has_call(events: Iterable[Event]) -> bool:
    return any(isinstance(event, ToolCallStart) for event in events)
