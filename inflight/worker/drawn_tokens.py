"""`DrawnTokens`: what was drawn for each slot: the last token, and whole sequences for penalties. With drafts also how many
tokens there are, and the drafts behind them.

Owned by the thread that computes, apart from `post`. What a slot holds changes with each step that draws for it, and with
nothing else: on the last stage when that is sampled, on earlier ones when its message is taken in. Both happen in step order.
So a step that has waited for the latest step that draws for one of its slots finds what that one left there, whoever had the
slot before.

A message of n sampling rows is int32 [n, (k + 1) + k]: the tokens emitted, then -1; then the next drafts, then -1. Without
drafts k is 0: one token each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from inflight.distributed.token_link import TokenReceiver, TokenSender
from inflight.interface.request import Int32Array
from inflight.interface.step import NewRequestData, TokenDelta


class DrawnTokens:
    """
    Args:
        num_speculative_tokens: k.
        senders: on the last of several stages: every message goes there.
        receiver: on the earlier stages that are told: all messages come from there.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        *,
        num_speculative_tokens: int = 0,
        senders: Sequence[TokenSender] = (),
        receiver: TokenReceiver | None = None,
    ) -> None:
        k = num_speculative_tokens
        self._last = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.num_tokens: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)  # the one drawn last included; if k > 0
        self.drafts: Int32Array = np.full((max_num_seqs, k), -1, dtype=np.int32)
        # pages of rows that no penalty and no proposer reads are never touched; on the rank that draws
        self.token_ids: Int32Array = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self._k, self._device = k, device
        self._senders, self._receiver = tuple(senders), receiver
        self._expected: deque[tuple[int, Int32Array, Int32Array, Future[Tensor]]] = deque()

    def post(self, num_rows: int) -> Future[Tensor] | None:
        """The message of the next step that samples, on a stage that is told. Called by the thread that prepares."""
        return self._receiver.post(num_rows) if self._receiver is not None and num_rows else None

    def expect(self, step_id: int, slots: Int32Array, positions: Int32Array, message: Future[Tensor] | None) -> None:
        """A step that draws for `slots`, the first tokens at `positions`, is computed here: its message will come."""
        if message is not None:
            self._expected.append((step_id, slots, positions, message))

    def receive(self, step_id: int) -> None:
        """Take in the messages up to that of `step_id`, and what else has come. Waits for them."""
        expected = self._expected
        while expected and (expected[0][0] <= step_id or expected[0][3].done()):
            _, slots, positions, message = expected.popleft()
            self._take_in(slots, positions, message.result())

    def fill(self, input_ids: Tensor, indices: Tensor, slots: Tensor) -> None:
        """Write the token drawn last for each of `slots` to `input_ids[indices]`."""
        if len(indices):
            input_ids[indices] = self._last[slots]

    def remember(self, requests: Sequence[NewRequestData], forced: TokenDelta | None) -> None:
        """What a plan says of its slots' tokens, for penalties that look at them. Called when the steps before have sampled:
        they may draw for a request that had the slot before, or what the forced tokens supersede."""
        for data in requests:
            self.token_ids[data.slot, : len(data.token_ids)] = data.token_ids
        if forced is not None:
            self.token_ids[forced.slots, forced.positions] = forced.token_ids

    def write(self, slots: Int32Array, positions: Int32Array, token_ids: Int32Array) -> None:
        """Drawn tokens, or drafts that the next draws stand behind; all [n]."""
        fits = positions < self.token_ids.shape[1]  # the last token of a sequence at max_model_len is never looked at
        self.token_ids[slots[fits], positions[fits]] = token_ids[fits]

    def add(self, slots: Int32Array, positions: Int32Array, message: Tensor) -> None:
        """A step's message, on the last stage: the first tokens emitted for `slots` stand at `positions`."""
        for sender in self._senders:
            sender.send(message)
        self._take_in(slots, positions, message)

    def _take_in(self, slots: Int32Array, positions: Int32Array, message: Tensor) -> None:
        index = torch.from_numpy(slots.astype(np.int64)).to(self._device)
        if not self._k:
            self._last[index] = message[:, 0].to(self._device)
            return
        columns = message.cpu().numpy()
        tokens, self.drafts[slots] = columns[:, : self._k + 1], columns[:, self._k + 1 :]
        counts = (tokens >= 0).sum(axis=1, dtype=np.int32)
        self.num_tokens[slots] = positions + counts
        self._last[index] = torch.from_numpy(tokens[np.arange(len(tokens)), counts - 1]).to(self._device)
