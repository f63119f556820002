"""`DrawnTokens`: the last drawn token of each slot and, with speculative decoding, its next drafts (guessed tokens).

A slot is the place in the batch that one request keeps while it runs. `DrawnTokens` also keeps whole sequences, because
penalties, bad words and proposers (which guess drafts) read them. Only the compute thread uses it.

The last pipeline stage changes a slot when it samples a step that draws for the slot. An earlier stage changes the slot when it
applies the message with the step's tokens. Each stage does this in step order. A step waits until the tokens of the latest
older step that draws its inputs are here. So the step finds the right tokens, even if another request had the slot before.

A step's message is int32 [n, (k + 1) + k], with one line for each of the n rows that draw. A line has the emitted tokens (drawn
tokens that become output), padded with -1 to k + 1, and then the next drafts, padded with -1 to k. k is the most drafts of a
row. Without drafts k is 0, so a line is one token.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from inflight.distributed.token_link import TokenSender
from inflight.interface.request import Int32Array
from inflight.interface.step import NewRequestData, TokenDelta


class DrawnTokens:
    """
    Args:
        num_speculative_tokens: k, the most drafts per row.
        senders: each sends every message to one earlier stage. Empty except on the last pipeline stage.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        *,
        num_speculative_tokens: int = 0,
        senders: Sequence[TokenSender] = (),
    ) -> None:
        self._k = num_speculative_tokens
        self._last: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        # how many tokens each slot's request has, the last drawn token included; used only if k > 0
        self.num_tokens: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self.drafts: Int32Array = np.full((max_num_seqs, self._k), -1, dtype=np.int32)
        # each slot's sequence, on the rank that draws; a prompt is written only if a penalty, a bad word or a proposer reads it
        self.token_ids: Int32Array = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.senders = tuple(senders)

    def fill(self, input_ids: Int32Array, indices: Int32Array, slots: Int32Array) -> None:
        """Write the last drawn token of each of `slots` to `input_ids[indices]`."""
        input_ids[indices] = self._last[slots]

    def remember(self, requests: Sequence[NewRequestData], forced: TokenDelta | None) -> None:
        """Keep the tokens of new requests and the tokens that a grammar has forced.

        Call it only after all older steps have sampled. Otherwise they could overwrite these tokens: an older step may draw
        for a request that had the slot before, or may draw a token that a forced token replaces.
        """
        for data in requests:
            self.token_ids[data.slot, : len(data.token_ids)] = data.token_ids
        if forced is not None:
            self.token_ids[forced.slots, forced.positions] = forced.token_ids

    def write(self, slots: Int32Array, positions: Int32Array, token_ids: Int32Array) -> None:
        """Write drawn tokens, or the drafts before a draw, to the slots' sequences. All arguments are [n]."""
        fits = positions < self.token_ids.shape[1]  # nothing reads a token beyond max_model_len
        self.token_ids[slots[fits], positions[fits]] = token_ids[fits]

    def add(self, slots: Int32Array, positions: Int32Array, message: Tensor) -> None:
        """Send a step's message to the earlier stages, and apply it. Called on the last stage. The first token emitted for
        `slots[i]` is at `positions[i]`."""
        for sender in self.senders:
            sender.send(message.cpu())  # the links are between hosts
        self.apply(slots, positions, message)

    def apply(self, slots: Int32Array, positions: Int32Array, message: Tensor) -> None:
        """Apply a step's message; the arguments are the same as for `add`."""
        columns = message.cpu().numpy()
        if not self._k:
            self._last[slots] = columns[:, 0]
            return
        tokens = columns[:, : self._k + 1]
        self.drafts[slots] = columns[:, self._k + 1 :]
        counts = (tokens >= 0).sum(axis=1, dtype=np.int32)
        self.num_tokens[slots] = positions + counts
        self._last[slots] = tokens[np.arange(len(tokens)), counts - 1]
