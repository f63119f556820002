"""`Channel`: carries tensors, and nothing else, from one rank to another. The links between pipeline stages use channels."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Channel(ABC):
    """One rank's end of a connection to one peer, for one purpose. Tensors arrive in the order in which they were sent.

    Both ends know shape and dtype of every tensor beforehand, so only its bytes are sent. There are two kinds of channels:

    - A channel of the host (`World.channel`) goes both ways. One thread sends and another receives, and both wait: `send` until
      the tensor may be changed, `receive` until it is filled. They raise ConnectionError when the channel is closed or the peer
      is gone, and TimeoutError when the peer is silent for too long.
    - A channel between devices (`World.device_channel`) goes one way: one end only sends, the other only receives. Both launch
      the transfer on the current stream, and return. Later work on this stream may change the sent tensor, or read the received
      one. They raise ConnectionError, or RuntimeError from torch, when the channel is closed.
    """

    @abstractmethod
    def send(self, tensor: Tensor) -> None:
        """Send a contiguous tensor."""

    @abstractmethod
    def receive(self, tensor: Tensor) -> None:
        """Fill a contiguous tensor."""

    @abstractmethod
    def close(self) -> None:
        """End every wait at this end, now and later, and notify the peer. If a device is in a transfer, the transfer ends with
        undefined contents. Idempotent; any thread may call it."""
