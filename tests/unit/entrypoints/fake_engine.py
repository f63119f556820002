"""An engine for the command line's tests: it answers at once, one character a step, and remembers what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from inflight.config.engine_args import EngineArgs
from inflight.engine.request.image_support import NoImages
from inflight.engine.request.request_state import RequestOutputKind
from inflight.errors import InvalidRequestError, TokenizerError
from inflight.outputs import CompletionOutput, Logprob, RequestOutput
from inflight.sampling_params import SamplingParams
from inflight.structured_outputs_params import StructuredOutputsParams
from inflight.timeline import Event

Answer = Callable[[str], str]


def echo(prompt: str) -> str:
    return f"{prompt}!"


class FakeEngine:
    """What the commands use of `LLMEngine`. Tokens are characters.

    Attributes:
        params: request id -> the parameters it came with.
        prompts: request id -> its prompt as text.
        most_unfinished: the most requests it has held at once.
        on_step: called with the step's number, before it.
    """

    def __init__(
        self,
        *,
        answer: Answer = echo,
        has_chat_template: bool = False,
        max_model_len: int = 1000,
        max_num_seqs: int = 4,
        default_params: SamplingParams | None = None,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.tokenizer: object | None = object()
        self.images = NoImages()
        self.default_params = default_params or SamplingParams()
        self.params: dict[str, SamplingParams] = {}
        self.prompts: dict[str, str] = {}
        self.args: EngineArgs | None = None
        self.most_unfinished = 0
        self.is_closed = False
        self.on_step = on_step
        self.core = SimpleNamespace(scheduler=self)
        self._answer = answer
        self._has_chat_template = has_chat_template
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._unfinished: dict[str, str] = {}  # request id -> what is emitted so far
        self._kinds: dict[str, RequestOutputKind] = {}
        self._num_steps = 0

    def __call__(self, args: EngineArgs) -> FakeEngine:
        """As the context's object: the factory."""
        self.args = args
        return self

    @property
    def num_waiting(self) -> int:
        return max(0, len(self._unfinished) - self._max_num_seqs)

    def add_request(
        self,
        request_id: str,
        prompt: Mapping[str, Any],
        params: SamplingParams,
        *,
        kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY,
        add_special_tokens: bool = True,
    ) -> None:
        assert request_id not in self._unfinished
        self._kinds[request_id] = kind
        ids = prompt.get("prompt_token_ids")
        if ids is not None and not all(isinstance(token_id, int) for token_id in ids):
            raise InvalidRequestError("prompt_token_ids are not integers")
        text = prompt["prompt"] if ids is None else "".join(map(chr, ids))
        room = self._max_model_len - len(text)
        if room < 1:
            raise InvalidRequestError(f"too long: {room} tokens are left")
        self.params[request_id], self.prompts[request_id] = params, text
        self._unfinished[request_id] = ""
        self.most_unfinished = max(self.most_unfinished, len(self._unfinished))

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        if not self._has_chat_template:
            raise TokenizerError("the model has no chat template")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise InvalidRequestError("messages is no list of dicts")
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return [ord(character) for character in (f"[{len(tools)} tools]" if tools else "") + text]

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        return {"prompt_token_ids": self.render_chat(messages, **options)}

    def with_strict_tools(
        self, params: SamplingParams, tools: Sequence[Mapping[str, Any]] | None
    ) -> SamplingParams | None:
        if not any(tool.get("strict") for tool in tools or ()):
            return params
        return replace(params, structured_outputs=StructuredOutputsParams(json_object=True))

    def has_unfinished_requests(self) -> bool:
        return bool(self._unfinished)

    def step(self) -> list[RequestOutput]:
        self._num_steps += 1
        self.on_step(self._num_steps)
        outputs = [self._advance(request_id) for request_id in list(self._unfinished)[: self._max_num_seqs]]
        return [
            output
            for output in outputs
            if output.finished or self._kinds[output.request_id] is RequestOutputKind.CUMULATIVE
        ]

    def timeline_events(self, first_step: int = 0) -> dict[str, list[Event]]:
        """Every step took 10 ms: one to plan it, one to prepare it, eight for its forward."""

        def events(phase: str, start: int, end: int) -> list[Event]:
            milliseconds = [(step, 10 * step + start, 10 * step + end) for step in range(1, self._num_steps + 1)]
            return [
                Event(step, phase, a * 1_000_000, b * 1_000_000) for step, a, b in milliseconds if step >= first_step
            ]

        return {"engine": events("plan", 0, 1), "rank 0": events("prepare", 1, 2) + events("forward", 2, 10)}

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._unfinished.pop(request_id, None)

    def close(self) -> None:
        assert not self._unfinished, "closed with requests unfinished"
        self.is_closed = True

    def _advance(self, request_id: str) -> RequestOutput:
        prompt, params = self.prompts[request_id], self.params[request_id]
        answer = self._answer(prompt)
        left = self._max_model_len - len(prompt)
        room = min(left, params.max_tokens or left)
        if params.ignore_eos:
            answer += "." * room
        count = len(self._unfinished[request_id]) + 1
        text = self._unfinished[request_id] = answer[:count]
        reason = "length" if count >= room else "stop" if count >= len(answer) else None
        if reason is not None:
            del self._unfinished[request_id]
        completions = [
            CompletionOutput(
                index=index,
                text=text,
                token_ids=[ord(character) for character in text],
                cumulative_logprob=None if params.logprobs is None else float("-inf"),
                logprobs=None if params.logprobs is None else [{ord(c): Logprob(float("-inf"), 1, c)} for c in text],
                finish_reason=reason,
            )
            for index in range(params.n)
        ]
        return RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=[ord(character) for character in prompt],
            outputs=completions,
            finished=reason is not None,
        )
