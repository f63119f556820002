"""`Presenter`: writes the answer to one request from the engine's outputs, as a stream or as one body."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from inflight.entrypoints.http.bodies import Usage
from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.http.sse import COMMENT, EVENTS
from inflight.entrypoints.http.validated import ValidatedRequest
from inflight.entrypoints.json_lines import escape_line_breaks
from inflight.interface.events import ContentDelta, Event, ReasoningDelta
from inflight.outputs import CompletionOutput, RequestOutput
from inflight.tokenizer.tokenizer import Tokenizer

_SLOW_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


@dataclass(slots=True)
class UsageCount:
    """Counts the tokens of an answer so far. Each prompt counts once, even if it has several choices."""

    completion_tokens: int = 0
    reasoning_tokens: int | None = None  # None if no parser searches the answers for reasoning
    # prompt index -> the number of the prompt's tokens, and how many of them were in the prefix cache
    prompts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        self.prompts[prompt_index] = (len(output.prompt_token_ids), output.num_cached_tokens)
        for choice in output.outputs:
            self.completion_tokens += len(choice.token_ids)
            if choice.events is not None:
                self.reasoning_tokens = (self.reasoning_tokens or 0) + choice.num_reasoning_tokens

    def as_json(self) -> Usage:
        prompt_tokens = sum(tokens for tokens, _ in self.prompts.values())
        usage: Usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self.prompts.values())},
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


@dataclass(frozen=True)
class AnswerTo:
    """What a presenter gets: `answer_id` is the id of the answer to `request`. `tokenizer`: None if the engine has none."""

    answer_id: str
    request: ValidatedRequest
    fingerprint: str
    tokenizer: Tokenizer | None


class Presenter(ABC):
    """Each request has its own presenter. For a stream, call `opening`, then `chunks` for each output in the order in which the
    outputs come, and then `end` or `failure`. For one body, call only `body`."""

    id_prefix: str  # the beginning of an answer's id
    media_type = EVENTS  # of a stream
    has_begun = False  # whether an output was written

    def __init__(self, to: AnswerTo) -> None:
        self._tokenizer, self._top_logprobs = to.tokenizer, to.request.params.logprobs  # None: no log-probabilities
        self._usage = UsageCount()

    def opening(self) -> bytes:
        """The events that a stream sends at once, before the first output. If there are none, a request that fails before its
        first output can still get an error with a status of its own."""
        return b""

    @abstractmethod
    def chunks(self, prompt_index: int, output: RequestOutput) -> list[bytes]:
        """The events for `output`, which contains only what is new since the output before it. The list may be empty."""

    @abstractmethod
    def end(self) -> bytes:
        """The last events of a stream."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """The last events of a stream whose request has failed after something was sent."""

    @abstractmethod
    def body(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The whole answer. `outputs` has one finished output per prompt."""

    async def keep(self) -> None:
        """Called when the answer is complete, before its last part is sent: an API that stores answers stores this one."""

    def progress(self, total: int, cached: int, processed: int, milliseconds: float) -> bytes:
        """The events that say how many tokens of the prompt are computed, `cached` ones among them. "" if the API has none."""
        return b""

    def keep_alive(self) -> bytes:
        """What a stream sends if there has been no event for some time, perhaps before the first output."""
        return COMMENT


def to_json_in_slices(value: object) -> bytes:
    """The JSON of a value with log-probabilities, which may be large. pydantic's encoder would hold the GIL until all of it is
    encoded. This encoder is written in Python, so other threads can run in between."""
    return escape_line_breaks("".join(_SLOW_ENCODER.iterencode(value)).encode("utf-8"))


def events_of(choice: CompletionOutput, *, with_reasoning: bool) -> Sequence[Event]:
    """The events of an output that the answer shows, also if no parser reads its text."""
    if choice.events is None:
        return [ContentDelta(choice.text)] if choice.text else []
    if with_reasoning:
        return choice.events
    return [event for event in choice.events if not isinstance(event, ReasoningDelta)]
