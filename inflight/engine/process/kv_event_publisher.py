"""`KVEventPublisher`: publishes what happens to the prefix cache with ZeroMQ, as vLLM does, for routers outside of Inflight.

A message has three frames: the topic, its number (8 bytes, the first is 0), and [time, events, number of the replica] in
msgpack. A subscriber that lacks messages sends the number of the first one to the replay endpoint, and gets them again, each
with its number. Number -1 ends this answer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from inflight.config.kv_events import KVEventsConfig
from inflight.errors import ConfigError
from inflight.interface.block_events import CLEARED, BlockEvent

logger = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)


class KVEventPublisher:
    """A thread publishes. The first message says that the cache is empty.

    Raises:
        ConfigError: an endpoint cannot be used.
    """

    def __init__(self, config: KVEventsConfig, replica: int) -> None:
        self._config, self._replica = config, replica
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._number = 0
        self._is_closing = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = [self._open(zmq.PUB, config.endpoint)]
        if config.replay_endpoint is not None:
            self._sockets.append(self._open(zmq.ROUTER, config.replay_endpoint))
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="inflight-kv-events", daemon=True)
        self._thread.start()
        self.publish([CLEARED])

    def _open(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        address, _, port = endpoint.rpartition(":")
        endpoint = f"{address}:{int(port) + self._replica}"
        opened = self._context.socket(kind)
        opened.set_hwm(self._config.hwm)
        try:
            # as in vLLM: the engine is the stable side if its address is not one certain machine's
            if kind == zmq.ROUTER or "*" in address or "::" in address:
                opened.bind(endpoint)
            else:
                opened.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"kv_events_config: {endpoint} cannot be used: {error}; give an address of this machine and a free port"
            ) from error
        return opened

    def publish(self, events: Sequence[BlockEvent]) -> None:
        """Publish a message with these events. Never waits. If too many wait, this one is lost, and its number is missing."""
        number, self._number = self._number, self._number + 1
        if len(self._waiting) >= self._config.max_queue_size:
            logger.warning("message %d about the prefix cache is lost, because %d wait", number, len(self._waiting))
            return
        self._waiting.append((number, msgspec.msgpack.encode((time.time(), events, self._replica))))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Publish what waits, and end the thread."""
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        for awaited in (self._wake, *self._sockets[1:]):
            poller.register(awaited, zmq.POLLIN)
        while not self._is_closing:
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
                self._send_waiting()
            for each in self._sockets[1:]:
                if each in ready:
                    self._send_again(each)
        self._context.destroy(linger=100)
        os.close(self._wake)

    def _send_waiting(self) -> None:
        while self._waiting:
            number, payload = message = self._waiting.popleft()
            self._kept.append(message)
            self._sockets[0].send_multipart([self._config.topic.encode(), number.to_bytes(8, "big"), payload])

    def _send_again(self, replay: zmq.Socket[bytes]) -> None:
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("a request for events of the prefix cache is not one number of 8 bytes")
            return
        subscriber, first = frames[0], int.from_bytes(frames[2], "big")
        for number, payload in self._kept:
            if number >= first:
                replay.send_multipart([subscriber, b"", number.to_bytes(8, "big"), payload])
        replay.send_multipart([subscriber, b"", END, b""])
