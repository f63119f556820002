"""`ChunkPresenter`: what the answers of /v1/chat/completions and /v1/completions have in common."""

import time
from collections.abc import Sequence
from typing import Any, cast

from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.http.presenter import AnswerTo, Presenter, to_json_in_slices
from inflight.entrypoints.http.sse import DONE
from inflight.entrypoints.json_lines import to_json
from inflight.entrypoints.openai.bodies import Answer, ChatChunkChoice, CompletionChoice, FinishReason, Timings
from inflight.outputs import CompletionOutput, RequestOutput


class ChunkPresenter(Presenter):
    chunk_object: str
    body_object: str

    def __init__(self, to: AnswerTo) -> None:
        super().__init__(to)
        self._presentation = presentation = to.request.presentation
        self._timings: Timings | None = None  # what the next chunks have
        self._shared: Answer = {
            "id": to.answer_id,
            "created": int(time.time()),
            "model": presentation.model,
            "system_fingerprint": to.fingerprint,
        }
        # all chunks of a request begin with the same JSON, which is encoded only once
        self._head = b"data: " + to_json({**self._shared, "object": self.chunk_object})[:-1] + b',"choices":['
        has_null_usage = presentation.include_usage and not presentation.continuous_usage
        self._end = b',"usage":null}\n\n' if has_null_usage else b"}\n\n"

    def end(self) -> bytes:
        return self.usage_chunk() + DONE

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n" + DONE

    def usage_chunk(self) -> bytes:
        """The last event before [DONE]. Empty if the client did not ask for the usage."""
        if not self._presentation.include_usage:
            return b""
        return self._head + b'],"usage":' + to_json(self._usage.as_json()) + b"}\n\n"

    def _chunk(self, choice: ChatChunkChoice | CompletionChoice, **more: object) -> bytes:
        """An event with one choice. `more` has further members of the chunk."""
        if self._presentation.continuous_usage:
            more["usage"] = self._usage.as_json()
        if self._timings is not None:
            more["timings"] = self._timings
        members = b"," + to_json(more)[1:-1] if more else b""
        return b"%s%s]%s%s" % (self._head, to_json(choice, inf_nan_mode="null"), members, self._end)

    def _body(self, choices: Sequence[object], outputs: Sequence[RequestOutput], **more: Any) -> bytes:  # Any: JSON
        for prompt_index, output in enumerate(outputs):
            self._usage.add(prompt_index, output)
        answer = {
            **self._shared,
            "object": self.body_object,
            "choices": choices,
            "usage": self._usage.as_json(),
            **more,
        }
        if self._top_logprobs is None and not self._presentation.parts:
            return to_json(answer)
        return to_json_in_slices(answer)


def finish_reason_of(choice: CompletionOutput) -> FinishReason | None:
    """The choice's finish reason. It is never "error", because a presenter never gets the outputs of a failed request."""
    return cast("FinishReason | None", choice.finish_reason)
