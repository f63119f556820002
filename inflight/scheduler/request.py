"""`Request`: the complete state of one sequence. The scheduler owns it. Workers have copies, which can be rebuilt from it."""

from __future__ import annotations

from enum import Enum, auto

import numpy as np

from inflight.interface.request import EngineCoreRequest, Int32Array
from inflight.kv_cache.manager import RequestBlocks

NO_SLOT = -1
NO_DRAFTS = -1  # a row without drafts: the positions that it computes are known when it is planned


class RequestStatus(Enum):
    """WAITING -> RUNNING -> FINISHED. RUNNING -> PREEMPTED -> RUNNING, any number of times. Any status -> FINISHED."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


class Request:
    """Tokens, progress and blocks of one sequence. While it is RUNNING, it has a slot (a place) in the workers' batch.

    *Committed* state is the tokens and `num_tokens`. It changes when a step is committed. *Planned* state changes in
    `Scheduler.schedule`, so it is ahead by the steps in flight. `num_planned_tokens` also counts one token for each draw of
    these steps. `num_computed_tokens` grows toward `num_planned_tokens`, and the step in which it reaches that number draws one
    more token. While drafts are in flight, both numbers are upper bounds, which assume that every draft is accepted.

        0 <= num_computed_tokens < num_planned_tokens <= max_num_tokens,   num_tokens <= num_planned_tokens

    Attributes:
        order: the number of the request, counted in the order of arrival.
        draft_token_ids: drafts proposed by the last committed step that drew tokens. They follow the last token.
        num_drawn_tokens: 1 + the position of the last token that a committed step drew.
        is_long: when it was queued, more of its tokens had to be computed than `long_prefill_token_threshold`.
        due_time: when its newest token is drawn, on the clock of planned steps (`StepLimits`).
        has_untold_tokens: a grammar has forced the last tokens, and the workers do not know them yet. The next plan contains
            them.
    """

    def __init__(self, core: EngineCoreRequest, *, order: int, blocks: RequestBlocks, max_model_len: int) -> None:
        self.core = core
        self.request_id = core.request_id
        self.sampling = core.sampling
        self.order = order
        self.blocks = blocks
        self.status = RequestStatus.WAITING
        self.slot = NO_SLOT
        self.num_prompt_tokens = self.num_tokens = self.num_planned_tokens = len(core.prompt_token_ids)
        self.max_num_tokens = min(self.num_prompt_tokens + core.sampling.max_tokens, max_model_len)
        self.num_computed_tokens = 0
        self.num_in_flight = 0  # steps in flight with a row of this request
        self.staggered_until = 0  # while the last token is in flight, no step with a smaller id computes this request
        self.is_long = False
        self.due_time = 0.0
        self.num_cached_tokens = -1  # how many tokens the prefix cache had; -1: not admitted yet
        self.num_prompt_logprobs_done = 1  # the first prompt token has no logprob
        self.first_scheduled_time = 0.0
        self.has_grammar = core.sampling.params.structured_outputs is not None
        self.draft_token_ids: list[int] = []
        self.num_drawn_tokens = 0
        self.has_untold_tokens = False
        self._token_ids = np.array(core.prompt_token_ids, dtype=np.int32)

    @property
    def token_ids(self) -> Int32Array:
        """The prompt and the emitted tokens. Tokens that are appended later are not in the returned array."""
        return self._token_ids[: self.num_tokens]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether plans have drawn its first token, and it will get more."""
        return self.num_prompt_tokens < self.num_planned_tokens < self.max_num_tokens

    @property
    def has_planned_prompt(self) -> bool:
        """Whether plans have been made for all of the prompt except its last token."""
        return self.num_computed_tokens >= self.num_prompt_tokens - 1

    def max_drafts(self, num_speculative_tokens: int) -> int:
        """How many drafts may follow the last token. NO_DRAFTS if there are none and the last token's position is known."""
        if not num_speculative_tokens or self.has_untold_tokens:
            return NO_DRAFTS
        most = self.max_num_tokens - 1 - self.num_planned_tokens  # one more token is drawn after the last draft
        if self.num_planned_tokens > self.num_tokens:
            return min(num_speculative_tokens, most)
        return min(len(self.draft_token_ids), most) or NO_DRAFTS

    def append(self, token_id: int) -> None:
        if self.num_tokens == len(self._token_ids):
            grown = np.empty(min(self.max_num_tokens, self.num_tokens * 2 + 64), dtype=np.int32)
            grown[: self.num_tokens] = self._token_ids
            self._token_ids = grown
        self._token_ids[self.num_tokens] = token_id
        self.num_tokens += 1

    def describe(self) -> str:
        """Returns the request's state as text, for an error dump."""
        return (
            f"{self.request_id}: {self.status.name}, slot {self.slot}, {self.num_prompt_tokens} prompt tokens, "
            f"{self.num_output_tokens} emitted, {self.num_computed_tokens} of {self.num_planned_tokens} planned, "
            f"{len(self.blocks.tables[0])} blocks, in {self.num_in_flight} steps in flight"
        )
