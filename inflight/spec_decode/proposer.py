"""`Proposer`: the base class of objects that guess a request's next tokens (drafts)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from inflight.interface.request import Int32Array
from inflight.interface.step import NewRequestData

NO_TOKEN = -1


class Proposer(ABC):
    """Proposes drafts after each step, on the rank that draws. The compute thread calls `propose` as soon as the step's tokens
    are known. The next forward waits until `propose` returns.

    The drafts must be a pure function of the tokens. Drafts never change which tokens a request gets, but they determine how
    many tokens a step gives it. All engines of one torchrun launch, and all repetitions of a run, must have the same steps.

    `propose` gets only tokens. A model that proposes has weights and a cache: see `DraftModel`.
    """

    num_speculative_tokens: int

    def begin(self, requests: Sequence[NewRequestData]) -> None:
        """These requests have just got their slots: forget all data about the requests that had the slots before. Called before
        the first `propose` for the new requests. Until the next call for a slot, tokens are only added to its sequence. A
        request that was preempted begins again, with the tokens that it has. The default does nothing, for proposers that keep
        no data."""

    @abstractmethod
    def propose(self, token_ids: Int32Array, slots: Int32Array, num_tokens: Int32Array) -> Int32Array:
        """Propose drafts for n requests.

        Args:
            token_ids: [max_num_seqs, max_model_len], one row per slot; must not be modified, and no view of it may be kept.
            slots: [n], the slots of the requests.
            num_tokens: [n], 1 or more: request i has the tokens `token_ids[slots[i], :num_tokens[i]]`. The elements after them
                have no meaning.

        Returns:
            [n, num_speculative_tokens]: the drafts of each request in order, padded with NO_TOKEN (-1). A request may have no
            drafts. Its tokens, its drafts and one more token must not be longer than max_model_len together.
        """
