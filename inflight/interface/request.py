"""`EngineCoreRequest` goes into the engine core, and `EngineCoreOutput` comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from inflight.sampling_params import SamplingParams

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class FinishReason(StrEnum):
    """Why a request ended. `STOP` and `LENGTH` are OpenAI's words; `ABORT` and `ERROR` are ours."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSampling:
    """The user's `SamplingParams`, and values that the engine adds: from the tokenizer, from the model, or a drawn seed.

    Attributes:
        params: the parameters as the user gave them.
        seed: 64 bits; a draw is a pure function of (seed, position). With n > 1 each sequence has its own derived seed.
        max_tokens: the most tokens to emit, at least 1.
        stop_token_ids: tokens that end the request: EOS ids (unless ignored) and the user's. Forbidden before min_tokens.
        eos_token_ids: the model's own tokens in `stop_token_ids`; after one of them the stop_reason is None.
        reasoning_end_ids: the grammar of `params.structured_outputs` starts after these tokens, or at once if there are none.
        bad_words_token_ids: sequences of tokens. After all tokens of a sequence but the last, the last one is forbidden.
    """

    params: SamplingParams
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    reasoning_end_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreRequest:
    """One sequence to generate. A request with n > 1 becomes n of these.

    `prompt_leader` names the sibling (same prompt, earlier index) whose prompt blocks this one may share. `arrival_time` is
    `time.monotonic()`. `cache_salt` separates the prefix caches of users who must not see each other's timing.
    """

    request_id: str
    prompt_token_ids: Int32Array
    sampling: ResolvedSampling
    arrival_time: float
    priority: int = 0
    cache_salt: str = ""
    prompt_leader: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsColumns:
    """Log-probabilities of n positions; column 0 is the token itself, 1..k the most probable ones in falling order."""

    token_ids: Int32Array  # [n, 1 + k]
    logprobs: Float32Array  # [n, 1 + k], of the raw logits
    ranks: Int32Array  # [n], 1 = the token was the most probable

    def rows(self, start: int, stop: int) -> LogprobsColumns:
        return LogprobsColumns(
            token_ids=self.token_ids[start:stop], logprobs=self.logprobs[start:stop], ranks=self.ranks[start:stop]
        )

    def top(self, k: int) -> LogprobsColumns:
        """Keep the token itself and the k most probable ones."""
        return LogprobsColumns(
            token_ids=self.token_ids[:, : 1 + k], logprobs=self.logprobs[:, : 1 + k], ranks=self.ranks
        )


# not frozen: a step makes hundreds of them, and a frozen one takes four times as long to make
@dataclass(slots=True, kw_only=True)
class EngineCoreOutput:
    """What one commit adds to one request.

    `prompt_logprobs` comes in pieces, in order, for the prompt positions from 1 (position 0 has none). `stop_reason` is the
    stop token id given by the user, None for EOS and length. Times are `time.monotonic()`. `error` says why the request failed:
    because of the request itself, or, with `engine_failed`, because of the engine.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    logprobs: LogprobsColumns | None = None
    prompt_logprobs: LogprobsColumns | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    first_scheduled_time: float = 0.0
    error: str = ""
    engine_failed: bool = False
