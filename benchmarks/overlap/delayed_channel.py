"""`DelayedChannel`: a channel that takes its time, below whatever stands on it."""

from __future__ import annotations

import time
from collections.abc import Iterator

from torch import Tensor

from inflight.distributed.channel import Channel


class DelayedChannel(Channel):
    """Waits before each send, and after each receive, for the next of these seconds."""

    def __init__(self, channel: Channel, send_seconds: Iterator[float], receive_seconds: Iterator[float]) -> None:
        self._channel, self._send_seconds, self._receive_seconds = channel, send_seconds, receive_seconds

    def send(self, tensor: Tensor) -> None:
        time.sleep(next(self._send_seconds))
        self._channel.send(tensor)

    def receive(self, tensor: Tensor) -> None:
        self._channel.receive(tensor)
        time.sleep(next(self._receive_seconds))

    def close(self) -> None:
        self._channel.close()
