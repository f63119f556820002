"""Sampled tokens from the last pipeline stage straight to the first, which embeds them; stages between see no token ids.

A link of its own, in step order: activations, far larger, cannot delay it. The number of tokens is in the plan.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from inflight.distributed.channel import Channel


class TokenSender:
    """The last stage's end; it owns the channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pool = ThreadPoolExecutor(1, "inflight-tokens")
        self._sent: Future[None] | None = None

    def send(self, token_ids: Tensor) -> None:
        """Queue a step's tokens, int32 [num_sampling_rows], at least one; nobody may change them any more.

        Raises:
            OSError: a send before this one failed.
        """
        if self._sent is not None and self._sent.done():
            self._sent.result()
        self._sent = self._pool.submit(self._channel.send, token_ids)

    def close(self) -> None:
        self._channel.close()
        self._pool.shutdown(wait=True, cancel_futures=True)


class TokenReceiver:
    """The first stage's end; it owns the channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pool = ThreadPoolExecutor(1, "inflight-tokens")

    def post(self, num_tokens: int) -> Future[Tensor]:
        """The tokens of the next step that samples, int32 [num_tokens]."""
        return self._pool.submit(self._receive, num_tokens)

    def close(self) -> None:
        self._channel.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _receive(self, num_tokens: int) -> Tensor:
        token_ids = torch.empty(num_tokens, dtype=torch.int32)
        self._channel.receive(token_ids)
        return token_ids
