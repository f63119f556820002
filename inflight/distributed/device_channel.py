"""`DeviceChannel`: tensors from one device's memory to another's, one way. What a `DeviceStageLink` stands on."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class DeviceChannel(ABC):
    """One rank's end of a connection to one peer. One end only sends, the other only receives.

    Both launch on the current stream and return; both ends launch the same sequence of shapes. Raise ConnectionError, or
    RuntimeError from torch, when the channel is closed.
    """

    @abstractmethod
    def send(self, tensor: Tensor) -> None:
        """Send a contiguous tensor; it may be changed by what comes behind on the stream."""

    @abstractmethod
    def receive(self, tensor: Tensor) -> None:
        """Fill a contiguous tensor, for what comes behind on the stream."""

    @abstractmethod
    def close(self) -> None:
        """Nothing is launched any more. A transfer that the device is in ends, its contents undefined. Idempotent, from any
        thread."""
