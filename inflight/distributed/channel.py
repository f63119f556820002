"""`Channel`: carries tensors, and nothing else, between two ranks. The links between pipeline stages use channels."""

from abc import ABC, abstractmethod

from torch import Tensor


class Channel(ABC):
    """One rank's end of a connection to one peer, for one purpose. Tensors arrive in the order in which they were sent.

    Both ends know shape and dtype of every tensor beforehand, so only its bytes are sent. There are two kinds of channels:

    - A channel of the host (`World.channel`) goes both ways. One thread may send while another receives. `send` waits until the
      tensor may be changed, and `receive` waits until the tensor is filled. They raise ConnectionError if the channel is closed
      or the peer is gone, and TimeoutError if the peer is silent for too long.
    - A channel between devices (`World.device_channel`) goes one way: one end only sends, the other only receives. `send` and
      `receive` launch the transfer on the current stream, and return. Later work on this stream may change the sent tensor, or
      read the received tensor. If the channel is closed, they raise ConnectionError, or RuntimeError from torch.
    """

    @abstractmethod
    def send(self, tensor: Tensor) -> None:
        """Send a contiguous tensor."""

    @abstractmethod
    def receive(self, tensor: Tensor) -> None:
        """Fill a contiguous tensor."""

    @abstractmethod
    def close(self) -> None:
        """Let every wait at this end fail, now and later, and notify the peer. If a device is in the middle of a transfer, the
        transfer ends with undefined contents. Idempotent. Any thread may call it."""
