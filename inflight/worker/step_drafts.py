"""`StepDrafts`: what a step does with drafts on the rank that draws: verifies those of its rows, and gets the next ones."""

import numpy as np
import torch
from torch import Tensor

from inflight.config.engine import EngineConfig
from inflight.interface.request import Int32Array
from inflight.interface.step import SchedulerOutput
from inflight.sample.sampler import Sampler
from inflight.sample.verification import num_emitted
from inflight.spec_decode.make_proposer import make_proposer
from inflight.spec_decode.model_drafter import DraftInputs, ModelDrafter
from inflight.worker.draw_rows import message_of
from inflight.worker.drawn_tokens import DrawnTokens
from inflight.worker.input_batch import NO_TOKENS
from inflight.worker.model_input import ForwardOutput, ModelInput, VerifiedDraws


def reads_hidden(config: EngineConfig) -> bool:
    """Whether a drafter reads the served model's hidden states behind its final norm, of all tokens."""
    spec = None if config.draft_model is None else config.draft_model.architecture.hidden_inputs
    return spec is not None and not spec.captured


class StepDrafts:
    """
    Args:
        config: of an engine with drafts.
        draft_model: what proposes them; None: a proposer that sees tokens only.
        drawn_tokens, sampler: those of the runner.
    """

    def __init__(
        self, config: EngineConfig, draft_model: ModelDrafter | None, drawn_tokens: DrawnTokens, sampler: Sampler
    ) -> None:
        assert config.speculative is not None
        self._max_model_len = config.model.max_model_len
        self._num_speculative_tokens = config.speculative.num_speculative_tokens
        self._draft_model = draft_model
        self._drawn_tokens = drawn_tokens
        self._sampler = sampler
        self._proposer = make_proposer(config)

    @classmethod
    def of(
        cls, config: EngineConfig, draft_model: ModelDrafter | None, drawn_tokens: DrawnTokens, sampler: Sampler
    ) -> "StepDrafts | None":
        """None: the engine has no drafts."""
        return None if config.speculative is None else cls(config, draft_model, drawn_tokens, sampler)

    def begin(self, plan: SchedulerOutput) -> None:
        """Call it in each step, before its draws: new requests have slots of older ones."""
        source = self._draft_model or self._proposer
        assert source is not None
        source.begin(plan.new_requests)

    def end_without_draws(self, model_input: ModelInput, forward: ForwardOutput) -> None:
        """Call it in a step that computes prompts only."""
        if self._draft_model is not None:
            self._propose(model_input, forward, NO_TOKENS)

    def verify(self, sampled: Tensor, model_input: ModelInput, forward: ForwardOutput) -> tuple[Tensor, VerifiedDraws]:
        """Returns the message to the other ranks, and the outcome of the draws with the next drafts. `sampled`: int32
        [num_draws]."""
        inputs = forward.forward_input.inputs
        positions, slots, drawn = inputs.first_positions, model_input.sampling_slots, self._drawn_tokens
        drafts = torch.from_numpy(drawn.drafts[slots]).to(sampled.device)
        counts = num_emitted(sampled, drafts, inputs.draw_start_loc).cpu().numpy()
        tokens = message_of(sampled.cpu().numpy(), counts, inputs.draw_start_loc, self._num_speculative_tokens + 1)
        rows, columns = np.nonzero(tokens >= 0)
        drawn.write(slots[rows], (positions[rows] + columns).astype(np.int32), tokens[rows, columns])
        num_tokens = np.minimum(positions + counts, self._max_model_len).astype(np.int32)
        next_drafts = self._propose(model_input, forward, num_tokens)
        message = torch.from_numpy(np.concatenate([tokens, next_drafts], axis=1)).to(sampled.device)
        return message, VerifiedDraws(counts, positions, inputs.draw_start_loc, next_drafts)

    def _propose(self, model_input: ModelInput, forward: ForwardOutput, num_tokens: Int32Array) -> Int32Array:
        """The next drafts of the rows that draw, which have so many tokens now: [num_sampling_rows, k], padded with -1."""
        inputs = forward.forward_input.inputs
        token_ids, rows = self._drawn_tokens.token_ids, inputs.sampling_rows
        if self._draft_model is None:
            assert self._proposer is not None
            return self._proposer.propose(token_ids, model_input.sampling_slots, num_tokens)
        assert model_input.sampling_rows is not None
        known = inputs.seq_lens.copy()
        known[rows] = num_tokens
        draft_inputs = DraftInputs(
            token_ids,
            model_input.plan.slots,
            num_computed_tokens=inputs.num_computed_tokens,
            num_tokens=known,
            drawing_rows=rows,
            sampling=model_input.sampling_rows,
            block_tables=model_input.block_tables,
            hidden=forward.hidden,
            query_start_loc=inputs.query_start_loc,
        )
        return self._draft_model.propose(draft_inputs, self._sampler)
