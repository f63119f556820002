"""`Proposer`: what a step that verifies drafts would try behind the tokens known."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from inflight.interface.request import Int32Array

NO_TOKEN = -1


class Proposer(ABC):
    """Proposes drafts after each step, on the rank that draws: its compute thread calls `propose` once the step's tokens are
    known, so what it takes is taken from the next forward.

    It must be a pure function of the tokens. Any drafts are verified to the same tokens, but they decide how many a step
    emits: every engine of a torchrun launch, and every repetition of a run, must see the same steps.

    It is given tokens and nothing else. What proposes from hidden states, or has weights and a cache, takes more than that.
    """

    num_speculative_tokens: int

    def forget(self, slots: Iterable[int]) -> None:
        """Forget these slots: other requests have them now. Called before the first `propose` for these requests; between two
        calls the known tokens of a slot only grow. The default does nothing, for proposers that keep nothing of a slot."""

    @abstractmethod
    def propose(self, token_ids: Int32Array, slots: Int32Array, num_tokens: Int32Array) -> Int32Array:
        """Drafts for n requests.

        Args:
            token_ids: [max_num_seqs, max_model_len], row = slot; must not be modified, and no view of it may be kept.
            slots: [n].
            num_tokens: [n], 1 or more: request i's known tokens are `token_ids[slots[i], :num_tokens[i]]`; what stands behind
                them means nothing.

        Returns:
            [n, num_speculative_tokens], the tokens expected behind the last known one, in order, then NO_TOKEN (-1). There may
            be none. They, and the token drawn behind the last of them, have their place within max_model_len.
        """
