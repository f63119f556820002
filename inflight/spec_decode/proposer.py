"""`Proposer`: the base class of objects that guess a request's next tokens (drafts)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from inflight.interface.request import Int32Array

NO_TOKEN = -1


class Proposer(ABC):
    """Proposes drafts after each step, on the rank that draws. The compute thread calls `propose` as soon as the step's tokens
    are known. The next forward waits until `propose` returns.

    The drafts must be a pure function of the tokens. Drafts never change the emitted tokens, but they decide how many tokens a
    step emits. Every engine of a torchrun launch, and every repetition of a run, must have the same steps.

    `propose` gets only tokens. A proposer that needs hidden states, weights or a cache does not fit this interface yet.
    """

    num_speculative_tokens: int

    def forget(self, slots: Iterable[int]) -> None:
        """Forget these slots: other requests have them now. Called before the first `propose` for these requests. Between two
        calls for a slot its tokens only grow. The default does nothing, for proposers that keep nothing."""

    @abstractmethod
    def propose(self, token_ids: Int32Array, slots: Int32Array, num_tokens: Int32Array) -> Int32Array:
        """Propose drafts for n requests.

        Args:
            token_ids: [max_num_seqs, max_model_len], row = slot; must not be modified, and no view of it may be kept.
            slots: [n].
            num_tokens: [n], 1 or more: request i has the tokens `token_ids[slots[i], :num_tokens[i]]`. The elements after them
                have no meaning.

        Returns:
            [n, num_speculative_tokens]: the drafts of each request in order, padded with NO_TOKEN (-1). There may be none.
            The drafts, and the token drawn after the last draft, must fit max_model_len.
        """
