"""`Channel`: tensors from one rank to another, nothing else. What a `StageLink` stands on, and where a test injects delays."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Channel(ABC):
    """One rank's end of a connection to one peer, for one purpose. Tensors arrive in the order in which they were sent.

    Both ends know shape and dtype of every tensor beforehand: only its bytes travel. One thread sends and one receives.
    Both raise ConnectionError when the channel is closed or the peer is gone, TimeoutError when it is silent for too long.
    """

    @abstractmethod
    def send(self, tensor: Tensor) -> None:
        """Send a contiguous tensor; returns when it may be changed."""

    @abstractmethod
    def receive(self, tensor: Tensor) -> None:
        """Fill a contiguous tensor; waits for it."""

    @abstractmethod
    def close(self) -> None:
        """End every wait at this end, now and later, and tell the peer. Idempotent, from any thread."""
