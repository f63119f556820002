"""`Presenter`: the engine's outputs of one request, written as its answer: as chunks of a stream, or as one body."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.entrypoints.openai.validated import Presentation
from inflight.outputs import RequestOutput
from inflight.tokenizer.tokenizer import Tokenizer

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
encode_json = _ENCODER.encode
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class UsageCount:
    """Tokens so far. Of each prompt the prompt counts once, however many choices it has."""

    completion_tokens: int = 0
    prompts: dict[int, tuple[int, int]] = field(default_factory=dict)  # prompt index -> tokens, cached tokens

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        self.prompts[prompt_index] = (len(output.prompt_token_ids), output.num_cached_tokens)
        self.completion_tokens += sum(len(choice.token_ids) for choice in output.outputs)

    def as_json(self) -> dict[str, Any]:
        prompt_tokens = sum(tokens for tokens, _ in self.prompts.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self.prompts.values())},
        }


class Presenter(ABC):
    """Of one request; called in the order of its outputs.

    A chunk is pasted together from pieces: what all of a request's chunks share is written once.
    """

    chunk_object: str
    body_object: str

    def __init__(
        self, answer_id: str, presentation: Presentation, fingerprint: str, tokenizer: Tokenizer | None
    ) -> None:
        self.id = answer_id
        self._presentation = presentation
        self._tokenizer = tokenizer
        self._usage = UsageCount()
        self._shared = {
            "id": answer_id,
            "created": int(time.time()),
            "model": presentation.model,
            "system_fingerprint": fingerprint,
        }
        self._head = "data: " + encode_json({**self._shared, "object": self.chunk_object})[:-1] + ',"choices":['

    @abstractmethod
    def chunks(self, prompt_index: int, output: RequestOutput) -> list[str]:
        """The events that say what is new; `output` is a delta. Maybe none."""

    @abstractmethod
    def body(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The whole answer; one finished output per prompt."""

    def usage_chunk(self) -> str | None:
        """The last event before [DONE], where it was asked for."""
        if not self._presentation.include_usage:
            return None
        return f'{self._head}],"usage":{encode_json(self._usage.as_json())}}}\n\n'

    def _chunk(self, choice: str, more: str = "") -> str:
        """An event of one choice. `more`: further members of the chunk, each behind a comma."""
        usage = ""
        if self._presentation.continuous_usage:
            usage = ',"usage":' + encode_json(self._usage.as_json())
        elif self._presentation.include_usage:
            usage = ',"usage":null'
        return f"{self._head}{choice}]{usage}{more}}}\n\n"

    def _body(self, choices: list[dict[str, Any]], outputs: Sequence[RequestOutput], **more: Any) -> bytes:
        for prompt_index, output in enumerate(outputs):
            self._usage.add(prompt_index, output)
        answer = {
            **self._shared,
            "object": self.body_object,
            "choices": choices,
            "usage": self._usage.as_json(),
            **more,
        }
        shown = self._presentation
        if shown.top_logprobs is None and not shown.prompt_logprobs:
            return encode_json(answer).encode("utf-8")
        return "".join(_ENCODER.iterencode(answer)).encode("utf-8")  # in Python, which lets other threads run
