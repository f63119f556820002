"""What goes into the engine core (`EngineCoreRequest`) and what comes out of it (`EngineCoreOutput`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from inflight.errors import ErrorKind
from inflight.interface.parts import PartResult, RequestPart
from inflight.sampling_params import SamplingParams

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class FinishReason(StrEnum):
    """Why a request ended. `STOP` and `LENGTH` are OpenAI's words, `ABORT` and `ERROR` are words of Inflight."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFrame:
    """What a model may write around the text that a grammar constrains: reasoning before it, headers, or a call instead.

    Reasoning is optional. It is everything from `begin` to `end`; no end token may be drawn in it. A frame decides, for the
    grammar and for the parser of the answer, what is reasoning.

    Attributes:
        begin: the tag that opens the reasoning, if the text begins with it; "" if the model cannot open it.
        end: the tag that closes the reasoning; "" if there is no reasoning.
        is_open: whether the reasoning is open at the beginning of the text, because the prompt has opened it.
        answer: the header of the answer, in a family that divides its text into messages. It is "" in other families, and if
            the constrained text itself begins with a header.
        next_message: in such a family, the text between two messages.
        calls: texts with which a call begins. A call may come instead of the constrained text. Without a grammar, no reasoning
            is looked for behind them.
        not_in_reasoning: texts that must not be in the reasoning, because they begin another message.
        max_reasoning_tokens: how many tokens the reasoning may have, in all its parts together; None for any number. After
            them `closing_token_ids` are forced. Without a grammar the rest of the text is free.
        closing_token_ids: a text that ends with `end`.
    """

    begin: str
    end: str
    is_open: bool = False
    answer: str = ""
    next_message: str = ""
    calls: tuple[str, ...] = ()
    not_in_reasoning: tuple[str, ...] = ()
    max_reasoning_tokens: int | None = None
    closing_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSampling:
    """The user's `SamplingParams`, and values that the engine adds: a seed, and values from the tokenizer and the model.

    Attributes:
        params: the parameters as the user gave them.
        seed: 64 bits. A draw depends on the logits, the parameters, the seed and the position. With n > 1 each sequence has
            its own seed.
        max_tokens: after this number of emitted tokens the request ends. 0: nothing is drawn, and the request ends when its
            prompt is computed (pooling).
        stop_token_ids: tokens that end the request: the `eos_token_ids` and the user's stop tokens. They cannot be drawn before
            `min_tokens` tokens are emitted.
        eos_token_ids: the model's end tokens (none with ignore_eos). If one ends the request, `stop_reason` is None.
        answer_frame: what may be around the text that `params.structured_outputs` constrains, and how long the reasoning may
            be; None if nothing may.
        bad_words_token_ids: sequences of tokens that must not be emitted. If all tokens of a sequence but the last have been
            emitted, the last one cannot be drawn.
    """

    params: SamplingParams
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    answer_frame: AnswerFrame | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()


# A sequence has made progress after a fault if it has got so many new tokens (see scheduler/quarantine.py).
MIN_PROGRESS_TOKENS = 2
# After so many faults in a row without progress it runs alone.
MAX_FAULTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreRequest:
    """One sequence to generate. A request with n > 1 becomes n of these, which are called siblings. The prompt stands beside
    them, once: it may have a hundred thousand tokens, and a hundred siblings.

    `prompt_leader` is the id of the first sibling, which computes the prompt and shares its blocks with this sequence. It is
    None in the first sibling itself. Requests with different `cache_salt` do not share cached prompts, so a user cannot find
    out by timing what another user has sent.

    `client` is a short name for the client that has sent the request (an API key, or a connection), so that clients can take
    turns; "" for a program that uses the engine itself.

    A *resumed* sequence goes on after its engine core was lost. The core computes its tokens again and emits only later ones:

    - `emitted_token_ids`: the tokens that the front end has already received, in order. They are output and not prompt, so
      `max_tokens`, `min_tokens`, penalties, the grammar and the seeds of draws count them.
    - `parts`: as they are after the results that the front end has already received (`RequestPart.after`).
    - `num_losses`: how many engine cores were lost with this sequence, without progress between them (`Quarantine`).
    """

    request_id: str
    sampling: ResolvedSampling
    priority: int = 0
    cache_salt: str = ""
    prompt_leader: str | None = None
    client: str = ""
    emitted_token_ids: tuple[int, ...] = ()
    num_losses: int = 0
    parts: tuple[RequestPart, ...] = ()

    def is_sibling(self, other: EngineCoreRequest) -> bool:
        """Whether both are sequences of the same request. A sequence is its own sibling."""
        return (self.prompt_leader or self.request_id) == (other.prompt_leader or other.request_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsColumns:
    """Log-probabilities at n positions. Column 0 is the token itself. Columns 1 to k are the k most probable tokens, the most
    probable one first."""

    token_ids: Int32Array  # [n, 1 + k]
    logprobs: Float32Array  # [n, 1 + k], of the raw logits
    ranks: Int32Array  # [n], of column 0: 1 if the token is the most probable one, 2 if it is the second, ...

    @staticmethod
    def joined(parts: Sequence[LogprobsColumns]) -> LogprobsColumns:
        """Returns the positions of all parts, one part after another. All parts have the same k."""
        return LogprobsColumns(
            token_ids=np.concatenate([part.token_ids for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            ranks=np.concatenate([part.ranks for part in parts]),
        )

    def rows(self, start: int, stop: int) -> LogprobsColumns:
        return LogprobsColumns(
            token_ids=self.token_ids[start:stop], logprobs=self.logprobs[start:stop], ranks=self.ranks[start:stop]
        )

    def pieces(self, max_size: int) -> Iterator[tuple[int, LogprobsColumns]]:
        """Yields the positions in pieces of at most `max_size` entries, each with the index of its first position."""
        num_rows = max(max_size // self.token_ids.shape[1], 1)
        for start in range(0, len(self.ranks), num_rows):
            yield start, self.rows(start, start + num_rows)

    def top(self, k: int) -> LogprobsColumns:
        """Returns only the columns of the token itself and the k most probable ones."""
        return LogprobsColumns(
            token_ids=self.token_ids[:, : 1 + k], logprobs=self.logprobs[:, : 1 + k], ranks=self.ranks
        )


# not frozen: a step makes hundreds of these objects, and making a frozen one takes four times as long
@dataclass(slots=True, kw_only=True)
class EngineCoreOutput:
    """What one commit (the scheduler's update after a step) adds to one request.

    `parts` are results of the request's parts. `stop_reason` is the user's stop token that ended the request; None if something
    else ended it. `queue_seconds` is the time from the arrival at the core to the first step. It is no point in time, because
    the front end may be on another machine, which has another clock. `error` says why the request failed, `error_kind` what
    the cause is, and `error_param` which parameter is wrong, if it is known (`InvalidRequestError.param`).
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    logprobs: LogprobsColumns | None = None
    parts: tuple[PartResult, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    queue_seconds: float = 0.0
    error: str = ""
    error_kind: ErrorKind = ErrorKind.REQUEST
    error_param: str = ""
