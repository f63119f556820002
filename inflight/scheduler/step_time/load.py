"""`StepLoad`: what a step computes, as the amounts from which `StepTimeModel` predicts its time.

The cost of a token depends on the number of tokens in the step. In a small step a token costs little, because the step spends
most of its time reading the weights. So there are three costs per token: for the first TOKEN_LIMITS[0] tokens of a step, for
the tokens up to TOKEN_LIMITS[1], and for all further tokens. If you add a new kind of work to steps, add an amount for it to
`StepLoad.amounts`.

A step of a model with experts reads more weights if it has more tokens. So there is one more amount for such a model: the share
of the weights that a step of this size is expected to read.
"""

from dataclasses import dataclass

import numpy as np

from inflight.interface.step import SchedulerOutput

TOKEN_LIMITS = (16, 128)  # token costs change at these numbers of tokens in a step


@dataclass(slots=True)
class StepLoad:
    """What a step computes.

    Attributes:
        num_tokens: all tokens, of prompts, decodes and drafts.
        num_draws: tokens that the step draws. The verification of a draft counts as one draw.
        num_pairs: how many pairs (prompt token, token that it attends to) there are.
        context: the number of tokens whose keys and values the step reads: for each row, the computed tokens before the row.
    """

    num_tokens: int = 0
    num_draws: int = 0
    num_pairs: int = 0
    context: int = 0

    def add_decode(self, context: int, num_drafts: int = 0) -> None:
        """Add a row that continues a sequence of `context` computed tokens with one token and its drafts."""
        self.num_tokens += 1 + num_drafts
        self.num_draws += 1 + num_drafts
        self.context += context

    def add_prompt(self, context: int, num_tokens: int, *, draws: bool) -> None:
        """Add a row of `num_tokens` prompt tokens that follow `context` computed ones."""
        self.num_tokens += num_tokens
        self.num_draws += draws
        self.context += context
        self.num_pairs += num_tokens * (2 * context + num_tokens) // 2

    def amounts(self) -> tuple[float, ...]:
        """The amounts by which the costs are multiplied, in the order of `StepTimeModel`'s costs."""
        few, many = TOKEN_LIMITS
        tokens = self.num_tokens
        return (
            1.0,
            min(tokens, few),
            max(0, min(tokens, many) - few),
            max(0, tokens - many),
            self.num_draws,
            self.num_pairs,
            self.context,
        )


def load_of(plan: SchedulerOutput) -> StepLoad:
    """The load of a planned step. Drafts count as planned, although the workers may have fewer."""
    scheduled, computed, drafts = plan.num_scheduled_tokens, plan.num_computed_tokens, plan.max_draft_tokens
    is_prompt = scheduled > 1 if not len(drafts) else (scheduled > 1) & (drafts < 0)
    lengths = scheduled[is_prompt].astype(np.int64)
    return StepLoad(
        num_tokens=int(scheduled.sum()),
        num_draws=int(np.count_nonzero(plan.samples)) + int(np.maximum(drafts, 0).sum()),
        num_pairs=int((lengths * (2 * computed[is_prompt] + lengths) // 2).sum()),
        context=int(computed.sum()),
    )
