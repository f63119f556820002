"""`RequestOutput` and its parts: what `generate` and `chat` return."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from inflight.errors import ErrorKind
from inflight.interface.events import Event


class Logprob(NamedTuple):  # three times as fast to make as a frozen dataclass: a prompt may need hundreds of thousands
    """One token's log-probability before penalties and masks. The most probable token of the vocabulary has `rank` 1."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """The times of a request's events, in seconds of `time.monotonic()`. `first_token_time` is None if the request makes
    vectors instead of text."""

    arrival_time: float
    first_scheduled_time: float
    first_token_time: float | None
    finished_time: float

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One completion of a request.

    `finish_reason` is "stop", "length", "abort" or "error", and None while the completion runs. `stop_reason` is the stop
    string or the stop token id that ended the completion; None if something else ended it, such as the model's own end token.
    `logprobs` has one dict per token: token id -> `Logprob`. It is None if the request wants none.

    If the request has a parser (the server's chats may have one), `events` are the content, the reasoning and the tool calls in
    the text, `num_reasoning_tokens` counts the tokens of the reasoning, and `text` is empty. Otherwise `events` is None.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    events: Sequence[Event] | None = None
    num_reasoning_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request with its completions, in the order of their index.

    `prompt` is None if the request was given as token ids. `parts`: kind -> what has come of the request's part of this kind.
    `num_cached_tokens` counts the prompt tokens whose KV came from the prefix cache. `error` says why a completion ended with
    the finish reason "error", `error_kind` whether the request, the engine or an overload is the cause, and `error_param` which
    parameter of the request is wrong, if it is known.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    parts: Mapping[str, Any] = field(default_factory=dict)
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str = ""
    error_kind: ErrorKind = ErrorKind.REQUEST
    error_param: str = ""

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """One entry per prompt token; the first is None. None if the request wants none, or some are still missing."""
        return self.parts.get("prompt_logprobs")
