"""`Request`: the complete state of one sequence. The scheduler owns it. Workers have copies, which can be rebuilt from it."""

import time
from array import array
from enum import Enum, auto

import numpy as np

from inflight.interface.request import EngineCoreRequest, Int32Array
from inflight.kv_cache.request_blocks import RequestBlocks

NO_SLOT = -1
NO_DRAFTS = -1  # for a row without drafts; the positions of such a row are known when it is planned
NO_MASKS = -1  # of a request without a grammar


class RequestStatus(Enum):
    """WAITING -> RUNNING -> FINISHED. RUNNING -> PREEMPTED -> RUNNING, any number of times. Any status -> FINISHED."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


class Request:
    """Tokens, progress and blocks of one sequence. While it is RUNNING, it has a slot (a place) in the workers' batch.

    *Committed* state is the tokens and `num_tokens`. It changes when a step is committed, that is, when the step's results are
    added to its requests. *Planned* state (`num_planned_tokens`, `num_computed_tokens`) changes in `Scheduler.schedule`, and
    already includes the steps in flight. `num_planned_tokens` is `num_tokens` plus the tokens that these steps draw.
    `num_computed_tokens` grows toward `num_planned_tokens`, and the step in which it reaches that number draws one more token.
    A draft is a guess of a later token. While drafts are in flight, both numbers are upper bounds, which assume that every
    draft is accepted.

        0 <= num_computed_tokens < num_planned_tokens <= max_num_tokens,   num_tokens <= num_planned_tokens

    A request with `only_prompt` draws nothing: `num_computed_tokens` may reach the other numbers, and then the request ends.

    Attributes:
        order: the number of the request, counted in the order of arrival.
        draft_token_ids: drafts proposed by the last committed step that drew tokens. They follow the last token.
        num_drawn_tokens: 1 + the position of the last token that a committed step drew.
        is_long: whether more than `long_prefill_token_threshold` of its tokens had to be computed when the scheduler last
            counted them.
        last_token_time: when the step that draws its newest token ends, on the clock of planned steps (`StepLimits`).
        num_faults: during how many faults it was in flight, without progress between them (`Quarantine`).
        num_tokens_at_fault: `num_tokens` at the last of these faults.
        defers_grammar: its grammar is not compiled yet, because requests are in quarantine (`Quarantine`).
        first_masked: a token that is drawn at this position or later needs a mask; NO_MASKS if the request has no grammar.
        has_unsent_tokens: a grammar has forced the last tokens, and the workers do not know them yet. The next plan contains
            them.
    """

    def __init__(
        self, core: EngineCoreRequest, prompt: Int32Array, *, order: int, blocks: RequestBlocks, max_model_len: int
    ) -> None:
        self.core = core
        self.request_id = core.request_id
        self.sampling = core.sampling
        self.order = order
        self.blocks = blocks
        self.status = RequestStatus.WAITING
        self.slot = NO_SLOT
        self._prompt_token_ids = prompt  # one array for all siblings: a prompt may be long, and they may be many
        self._output_token_ids = array("i", core.emitted_token_ids)
        self.num_prompt_tokens = len(prompt)
        self.num_tokens = self.num_planned_tokens = self.num_prompt_tokens + len(self._output_token_ids)
        self.max_num_tokens = min(self.num_prompt_tokens + core.sampling.max_tokens, max_model_len)
        self.num_computed_tokens = 0
        self.num_in_flight = 0  # steps in flight with a row of this request
        # While the newest token is being drawn, only steps with this id or a larger one may compute the request.
        self.staggered_until = 0
        self.is_long = False
        self.last_token_time = 0.0
        # how many tokens were in cached or shared blocks at the first admission; -1 before the admission
        self.num_cached_tokens = -1
        self.parts = core.parts
        self.arrival_time = time.monotonic()  # at this engine; the front end's clock may be another machine's
        self.queue_seconds = 0.0  # from then to the first admission
        frame, constraint = core.sampling.answer_frame, core.sampling.params.structured_outputs
        has_budget = frame is not None and frame.max_reasoning_tokens is not None
        self.first_masked = 0 if constraint is not None or has_budget else NO_MASKS
        self.draft_token_ids: list[int] = []
        self.num_drawn_tokens = 0
        self.num_faults = core.num_losses
        self.num_tokens_at_fault = self.num_tokens
        self.defers_grammar = False
        self.has_unsent_tokens = False

    @property
    def only_prompt(self) -> bool:
        """Whether its prompt is computed and nothing is drawn."""
        return self.max_num_tokens == self.num_prompt_tokens

    @property
    def has_grammar(self) -> bool:
        """Whether masks restrict some of its draws: those of a grammar, or those that end the reasoning. It is no attribute,
        because an object with 30 attributes has a dictionary of its own: five times the memory."""
        return self.first_masked != NO_MASKS

    @property
    def token_ids(self) -> Int32Array:
        """The prompt and the emitted tokens. The array must not be changed: it may be the prompt that siblings share."""
        return self.token_ids_from(0)

    def token_ids_from(self, start: int) -> Int32Array:
        """Returns `token_ids[start:]`. The prompt is copied only if tokens of the output follow."""
        prompt, num_prompt_tokens = self._prompt_token_ids, self.num_prompt_tokens
        output = np.array(self._output_token_ids[max(start - num_prompt_tokens, 0) :], dtype=np.int32)
        if not len(output):
            return prompt[start:]
        return output if start >= num_prompt_tokens else np.concatenate([prompt[start:], output])

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def has_begun(self) -> bool:
        return self.status is not RequestStatus.WAITING or bool(self.core.emitted_token_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether its first token is planned or drawn, and more tokens will be drawn after the planned ones."""
        return self.num_prompt_tokens < self.num_planned_tokens < self.max_num_tokens

    @property
    def has_planned_prompt(self) -> bool:
        """Whether plans have been made for all of the prompt except its last token."""
        return self.num_computed_tokens >= self.num_prompt_tokens - 1

    def max_drafts(self, num_speculative_tokens: int) -> int:
        """How many drafts the next row of this request may have after its newest token. NO_DRAFTS if it has none and the
        position of the newest token is known."""
        if not num_speculative_tokens or self.has_unsent_tokens:
            return NO_DRAFTS
        most = self.max_num_tokens - 1 - self.num_planned_tokens  # one more token is drawn after the last draft
        if self.num_planned_tokens > self.num_tokens:
            return min(num_speculative_tokens, most)
        return min(len(self.draft_token_ids), most) or NO_DRAFTS

    def append(self, token_id: int) -> None:
        self._output_token_ids.append(token_id)
        self.num_tokens += 1

    def describe(self) -> str:
        """Returns the request's state as text, for an error dump."""
        return (
            f"{self.request_id}: {self.status.name}, slot {self.slot}, {self.num_prompt_tokens} prompt tokens, "
            f"{self.num_output_tokens} emitted, {self.num_computed_tokens} of {self.num_planned_tokens} planned, "
            f"{len(self.blocks.tables[0])} blocks, in {self.num_in_flight} steps in flight"
        )
