"""`OllamaPresenter`: writes the answers of /api/chat and /api/generate, as lines of JSON or as one object.

The arguments of a call are a JSON object, so a call is sent only when the model has ended it.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from inflight.entrypoints.fields.messages import read_arguments
from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.http.presenter import AnswerTo, Presenter, events_of
from inflight.entrypoints.json_lines import to_json
from inflight.entrypoints.ollama.api import error_form
from inflight.errors import EngineClosedError
from inflight.interface.events import ContentDelta, ToolArgumentsDelta, ToolCallStart
from inflight.outputs import CompletionOutput, RequestOutput

Line = dict[str, Any]  # Any: the members of answers.ChatAnswer or answers.GeneratedText
_NANOSECONDS = 1_000_000_000


class Piece(NamedTuple):
    """A part of an answer; in a stream at most one member is not empty."""

    text: str = ""
    thought: str = ""
    calls: tuple[Line, ...] = ()


def head_of(model: str) -> bytes:
    """Returns the beginning of all lines of an answer. It is the same for all, so it is encoded only once."""
    return to_json({"model": model, "created_at": datetime.now(UTC).isoformat()})[:-1] + b","


class OllamaPresenter(Presenter):
    """For a request with one prompt and one choice."""

    id_prefix = "ollama"
    media_type = "application/x-ndjson"

    def __init__(self, to: AnswerTo) -> None:
        super().__init__(to)
        self._head = head_of(to.request.presentation.model)
        self._shows_thoughts = to.request.presentation.reasoning
        self._call: ToolCallStart | None = None  # the call that is open
        self._arguments = ""  # those of this call so far
        self._end: Line = {}

    @staticmethod
    @abstractmethod
    def shown(piece: Piece) -> Line:
        """Returns the members of an answer that contain this piece."""

    @classmethod
    def line(cls, head: bytes, piece: Piece, **more: object) -> bytes:
        """Returns a line. With `more` members, it is the last line."""
        return head + to_json({**cls.shown(piece), "done": bool(more), **more})[1:] + b"\n"

    # -- a stream ------------------------------------------------------------------------------------------------------

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[bytes]:
        return [self.line(self._head, piece) for piece in self._pieces(output)]

    def end(self) -> bytes:
        return self.line(self._head, Piece(), **self._end)

    def failure(self, error: ApiError) -> bytes:
        return error.body(error_form) + b"\n"

    def keep_alive(self) -> bytes:
        """JSON has no comments, so this is a piece without text."""
        return self.line(self._head, Piece())

    # -- a body --------------------------------------------------------------------------------------------------------

    def body(self, outputs: Sequence[RequestOutput]) -> bytes:
        (output,) = outputs
        pieces = list(self._pieces(output))
        text = "".join(piece.text for piece in pieces)
        thought = "".join(piece.thought for piece in pieces)
        calls = tuple(call for piece in pieces for call in piece.calls)
        return self.line(self._head, Piece(text, thought, calls), **self._end)

    # -- both ----------------------------------------------------------------------------------------------------------

    def _pieces(self, output: RequestOutput) -> Iterator[Piece]:
        """
        Raises:
            EngineClosedError: the server has ended the answer. The API has no `done_reason` for this.
        """
        self._usage.add(0, output)
        (choice,) = output.outputs
        for event in events_of(choice, with_reasoning=self._shows_thoughts):
            if isinstance(event, ToolArgumentsDelta):
                self._arguments += event.text
                continue
            yield from self._finished_call()
            if isinstance(event, ToolCallStart):
                self._call = event
                self._arguments = ""
            else:
                yield Piece(text=event.text) if isinstance(event, ContentDelta) else Piece(thought=event.text)
        if choice.finish_reason is not None:
            yield from self._finished_call()
            self._end = self._counts(choice, output)

    def _finished_call(self) -> Iterator[Piece]:
        """The open call, if there is one."""
        if self._call is not None:
            function = {"name": self._call.name, "arguments": read_arguments(self._arguments)}
            yield Piece(calls=({"id": self._call.id, "function": function},))
            self._call = None

    def _counts(self, choice: CompletionOutput, output: RequestOutput) -> Line:
        """The members of the last line: how the answer ended, numbers of tokens, and nanoseconds."""
        if choice.finish_reason == "abort":
            raise EngineClosedError("the server is shutting down")
        times = output.metrics
        spans = [0, 0, 0, 0]
        if times is not None and times.first_token_time is not None:
            points = (times.arrival_time, times.first_scheduled_time, times.first_token_time, times.finished_time)
            pairs = ((0, 3), (0, 1), (1, 2), (2, 3))
            spans = [round((points[end] - points[begin]) * _NANOSECONDS) for begin, end in pairs]
        total, waiting, prompt, answer = spans
        thoughts = self._usage.reasoning_tokens
        return {
            "done_reason": choice.finish_reason,
            "total_duration": total,
            "load_duration": waiting,
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_eval_duration": prompt,
            "eval_count": self._usage.completion_tokens,
            "eval_duration": answer,
            **({} if thoughts is None else {"thinking_eval_count": thoughts}),
        }


class OllamaChatPresenter(OllamaPresenter):
    @staticmethod
    def shown(piece: Piece) -> Line:
        message: Line = {"role": "assistant", "content": piece.text}
        if piece.thought:
            message["thinking"] = piece.thought
        if piece.calls:
            message["tool_calls"] = piece.calls
        return {"message": message}


class OllamaTextPresenter(OllamaPresenter):
    @staticmethod
    def shown(piece: Piece) -> Line:
        return {"response": piece.text, **({"thinking": piece.thought} if piece.thought else {})}
