"""`DrawnTokens`: the tokens that were drawn for each slot; in an engine with drafts also their number and the next drafts.

It keeps the last token of each slot, and the whole sequence for penalties and proposers. Owned by the thread that computes.

A slot changes only when a step draws for it: on the last stage when the step is sampled, on earlier stages when the step's
message is applied. Both happen in step order. So a step that waits for the latest step that draws for its slots finds the right
tokens, even if a slot had another request before.

The message of n sampling rows is int32 [n, (k + 1) + k]: the emitted tokens, filled up with -1, then the next drafts, filled up
with -1. Without drafts k is 0, and there is one token for each row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from inflight.distributed.token_link import TokenSender
from inflight.interface.request import Int32Array
from inflight.interface.step import NewRequestData, TokenDelta


class DrawnTokens:
    """
    Args:
        num_speculative_tokens: k, the most drafts per row.
        senders: each sends every message to one earlier stage; empty except on the last of several stages.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        *,
        num_speculative_tokens: int = 0,
        senders: Sequence[TokenSender] = (),
    ) -> None:
        k = num_speculative_tokens
        self._last = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        # how many tokens each slot has, the last drawn token included; used only if k > 0
        self.num_tokens: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self.drafts: Int32Array = np.full((max_num_seqs, k), -1, dtype=np.int32)
        # used on the rank that draws; if no penalty or proposer reads a slot, its memory is never touched
        self.token_ids: Int32Array = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self._k, self._device = k, device
        self._senders = tuple(senders)

    def fill(self, input_ids: Tensor, indices: Tensor, slots: Tensor) -> None:
        """Write the token drawn last for each of `slots` to `input_ids[indices]`."""
        if len(indices):
            input_ids[indices] = self._last[slots]

    def remember(self, requests: Sequence[NewRequestData], forced: TokenDelta | None) -> None:
        """Keep the tokens of new requests and forced tokens, for penalties.

        Call it only after all older steps have sampled. An older step may draw for a request that had the slot before,
        or may draw a token that a forced token replaces.
        """
        for data in requests:
            self.token_ids[data.slot, : len(data.token_ids)] = data.token_ids
        if forced is not None:
            self.token_ids[forced.slots, forced.positions] = forced.token_ids

    def write(self, slots: Int32Array, positions: Int32Array, token_ids: Int32Array) -> None:
        """Keep drawn tokens, or the drafts that precede a draw; all arguments are [n]."""
        fits = positions < self.token_ids.shape[1]  # nothing reads the last token of a sequence of max_model_len
        self.token_ids[slots[fits], positions[fits]] = token_ids[fits]

    def add(self, slots: Int32Array, positions: Int32Array, message: Tensor) -> None:
        """On the last stage: send and apply a step's message. The first token emitted for `slots[i]` is at
        `positions[i]`."""
        for sender in self._senders:
            sender.send(message)
        self.apply(slots, positions, message)

    def apply(self, slots: Int32Array, positions: Int32Array, message: Tensor) -> None:
        """Apply a step's message; the arguments are the same as for `add`."""
        index = torch.from_numpy(slots.astype(np.int64)).to(self._device)
        if not self._k:
            self._last[index] = message[:, 0].to(self._device)
            return
        columns = message.cpu().numpy()
        tokens, self.drafts[slots] = columns[:, : self._k + 1], columns[:, self._k + 1 :]
        counts = (tokens >= 0).sum(axis=1, dtype=np.int32)
        self.num_tokens[slots] = positions + counts
        self._last[index] = torch.from_numpy(tokens[np.arange(len(tokens)), counts - 1]).to(self._device)
