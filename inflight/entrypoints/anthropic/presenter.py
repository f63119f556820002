"""`MessagesPresenter`: writes the answers of /v1/messages.

A stream: message_start; for each block of the content content_block_start, content_block_delta ..., content_block_stop;
message_delta with the stop reason and the usage; message_stop. A ping may come at any place behind message_start.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from inflight.entrypoints.anthropic.api import error_form
from inflight.entrypoints.anthropic.bodies import AnsweredBlock, Message, MessageUsage, StopReason
from inflight.entrypoints.fields.messages import read_arguments
from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.http.presenter import AnswerTo, Presenter, events_of
from inflight.entrypoints.json_lines import to_json
from inflight.errors import EngineClosedError
from inflight.interface.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
    join_deltas,
)
from inflight.outputs import CompletionOutput, RequestOutput

# Some clients send a thought back only if it is signed. The server checks no signature, so all thoughts have the same one.
SIGNATURE = "aW5mbGlnaHQ="


class MessagesPresenter(Presenter):
    """For a request with one prompt and one choice."""

    id_prefix = "msg"

    def __init__(self, to: AnswerTo) -> None:
        super().__init__(to)
        self._id = to.answer_id
        self._model = to.request.presentation.model
        self._num_prompt_tokens = len(to.request.prompts[0].token_ids)
        self._max_tokens = to.request.params.max_tokens
        self._shows_thoughts = to.request.presentation.reasoning
        self._has_begun = False
        self._block: type[Event] | None = None  # the kind of the block that is open
        self._num_blocks = 0
        self._has_call = False
        self._stop: tuple[StopReason, str | None] | None = None

    # -- a stream ------------------------------------------------------------------------------------------------------

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[bytes]:
        self._usage.add(prompt_index, output)
        (choice,) = output.outputs
        chunks = self._beginning()
        for event in self._shown(choice):
            chunks += self._event_chunks(event)
        if choice.finish_reason is not None:
            self._stop = self._stop_of(choice)
        return chunks

    def end(self) -> bytes:
        assert self._stop is not None  # the last output has said it
        reason, text = self._stop
        delta = {"stop_reason": reason, "stop_sequence": text}
        end = [
            *self._block_end(),
            _event("message_delta", delta=delta, usage=self._usage_json()),
            _event("message_stop"),
        ]
        return b"".join(end)

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error.body(error_form) + b"\n\n"

    def keep_alive(self) -> bytes:
        return b"".join([*self._beginning(), _event("ping")])

    def _beginning(self) -> list[bytes]:
        if self._has_begun:
            return []
        self._has_begun = True
        return [_event("message_start", message=self._message([], None, None))]

    def _event_chunks(self, event: Event) -> list[bytes]:
        chunks: list[bytes] = []
        if isinstance(event, ToolCallStart) or (
            not isinstance(event, ToolArgumentsDelta) and type(event) is not self._block
        ):
            chunks += self._block_end()
            self._block = type(event)
            chunks.append(_event("content_block_start", index=self._num_blocks, content_block=_empty_block(event)))
            self._num_blocks += 1
        if isinstance(event, ToolCallStart):
            self._has_call = True
        else:
            chunks.append(self._delta(_delta(event)))
        return chunks

    def _block_end(self) -> list[bytes]:
        if self._block is None:
            return []
        signature = {"type": "signature_delta", "signature": SIGNATURE}
        chunks = [self._delta(signature)] if self._block is ReasoningDelta else []
        self._block = None
        return [*chunks, _event("content_block_stop", index=self._num_blocks - 1)]

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    # -- a body --------------------------------------------------------------------------------------------------------

    def body(self, outputs: Sequence[RequestOutput]) -> bytes:
        (output,) = outputs
        self._usage.add(0, output)
        (choice,) = output.outputs
        content = _blocks(self._shown(choice))
        self._has_call = any(block["type"] == "tool_use" for block in content)
        return to_json(self._message(content, *self._stop_of(choice)))

    # -- both ----------------------------------------------------------------------------------------------------------

    def _message(self, content: list[AnsweredBlock], reason: StopReason | None, stop_text: str | None) -> Message:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop_text,
            "usage": self._usage_json(),
        }

    def _shown(self, choice: CompletionOutput) -> Sequence[Event]:
        """The events of the blocks. Clients that do not ask for thoughts read the text of the first block."""
        return events_of(choice, with_reasoning=self._shows_thoughts)

    def _usage_json(self) -> MessageUsage:
        """Before the first output it is not known yet which tokens are in the prefix cache."""
        num_tokens, num_cached = self._usage.prompts.get(0, (self._num_prompt_tokens, 0))
        usage: MessageUsage = {
            "input_tokens": num_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": self._usage.completion_tokens,
        }
        if self._usage.reasoning_tokens is not None:
            usage["output_tokens_details"] = {"thinking_tokens": self._usage.reasoning_tokens}
        return usage

    def _stop_of(self, choice: CompletionOutput) -> tuple[StopReason, str | None]:
        """
        Raises:
            EngineClosedError: the server has ended the answer. The API has no stop reason for this.
        """
        if choice.finish_reason == "abort":
            raise EngineClosedError("the server is shutting down")
        if choice.finish_reason == "length":
            is_full = self._max_tokens is None or self._usage.completion_tokens < self._max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens", None
        if isinstance(choice.stop_reason, str):
            return "stop_sequence", choice.stop_reason
        return "tool_use" if self._has_call else "end_turn", None


def _event(name: str, **members: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode("ascii"), to_json({"type": name, **members}))


def _empty_block(event: Event) -> AnsweredBlock:
    """The block that `event` begins, without its text."""
    if isinstance(event, ToolCallStart):
        return {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
    if isinstance(event, ReasoningDelta):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _delta(event: ContentDelta | ReasoningDelta | ToolArgumentsDelta) -> dict[str, str]:
    if isinstance(event, ContentDelta):
        return {"type": "text_delta", "text": event.text}
    if isinstance(event, ReasoningDelta):
        return {"type": "thinking_delta", "thinking": event.text}
    return {"type": "input_json_delta", "partial_json": event.text}


def _blocks(events: Iterable[Event]) -> list[AnsweredBlock]:
    """The content of a whole answer."""
    blocks: list[Any] = []  # Any: each kind of block has other members
    for event in join_deltas(list(events)):
        if isinstance(event, ToolArgumentsDelta):
            blocks[-1]["input"] = read_arguments(event.text)
            continue
        blocks.append(_empty_block(event))
        if isinstance(event, ContentDelta):
            blocks[-1]["text"] = event.text
        elif isinstance(event, ReasoningDelta):
            blocks[-1] |= {"thinking": event.text, "signature": SIGNATURE}
    return blocks
