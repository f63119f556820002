"""`DrawnTokens`: what was drawn for each slot, on the rank that needs it: the last token, and whole sequences for penalties.

Owned by the thread that computes, apart from `expect`; steps go through in order, so what a slot holds is always of the request
that a step means, however many steps are being prepared behind it.
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
        sender: on the last of several stages: every draw goes there.
        receiver: on the first of several stages: all draws come from there.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        *,
        sender: TokenSender | None = None,
        receiver: TokenReceiver | None = None,
    ) -> None:
        self._last = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        # pages of rows that no penalty reads are never touched
        self.token_ids: Int32Array = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self._device = device
        self._sender, self._receiver = sender, receiver
        self._expected: deque[tuple[int, Tensor, Future[Tensor]]] = deque()

    def expect(self, step_id: int, slots: Int32Array) -> None:
        """A step that draws for `slots` on another stage has been prepared. Called by the thread that prepares."""
        if self._receiver is not None and len(slots):
            self._expected.append((step_id, self._index(slots), self._receiver.post(len(slots))))

    def remember(self, requests: Sequence[NewRequestData], forced: TokenDelta | None) -> None:
        """What a plan says of its slots' tokens, for penalties that look at them. Called when the steps before have sampled:
        they may draw for a request that had the slot before, or what the forced tokens supersede."""
        for data in requests:
            self.token_ids[data.slot, : len(data.token_ids)] = data.token_ids
        if forced is not None:
            self.token_ids[forced.slots, forced.positions] = forced.token_ids

    def fill(self, input_ids: Tensor, indices: Tensor, slots: Tensor, step_id: int) -> None:
        """Write the token drawn last for each of `slots`, in `step_id` at the latest, to `input_ids[indices]`. On the first of
        several stages it waits for that step's tokens."""
        expected = self._expected
        while expected and (expected[0][0] <= step_id or expected[0][2].done()):
            _, drawn_slots, future = expected.popleft()
            self._last[drawn_slots] = future.result().to(self._device)
        if len(indices):
            input_ids[indices] = self._last[slots]

    def add(self, slots: Int32Array, positions: Int32Array, token_ids: Tensor) -> None:
        """A step's draws on the last stage: token_ids int32 [num_rows], to stand at `positions`."""
        # a negative one says that nothing could be drawn: its request fails at commit, but may be in steps under way
        token_ids = token_ids.clamp(min=0)
        if self._sender is not None:
            self._sender.send(token_ids)
        self._last[self._index(slots)] = token_ids
        fits = positions < self.token_ids.shape[1]  # the last token of a sequence at max_model_len is never looked at
        self.token_ids[slots[fits], positions[fits]] = token_ids.cpu().numpy()[fits]

    def _index(self, slots: Int32Array) -> Tensor:
        return torch.from_numpy(slots.astype(np.int64)).to(self._device)
