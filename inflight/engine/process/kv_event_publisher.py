"""`KVEventPublisher`: publishes what happens to the prefix cache with ZeroMQ, as vLLM does, for routers outside of Inflight.

A message has three frames: the topic, its number (8 bytes, the first is 0), and [time, events, number of the replica] in
msgpack. A subscriber that lacks messages sends the number of the first one to the replay endpoint, and gets them again, each
with its number. Number -1 ends this answer.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from inflight.config.kv_events import KVEventsConfig, is_bound
from inflight.errors import ConfigError
from inflight.interface.block_events import CLEARED, BlockEvent

logger = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
MAX_REPLAYED = 256  # messages of an answer that wait for a peer; more are sent when it has read some of them
MAX_ASKING = 64  # requests for older messages that wait, because one is answered at a time
POLL_MILLISECONDS = 10  # how often to look whether the peer has read
MAX_UNREAD_SECONDS = 5.0  # an answer ends if its peer reads nothing for so long
MAX_RECEIVED_BYTES = 4096  # a peer that sends more in one frame is cut off


class KVEventPublisher:
    """A thread publishes. The first message says that the cache is empty. It is repeated for each subscription that arrives
    before the second message, because the subscribers of a process that was replaced need some time to connect again.

    Raises:
        ConfigError: an endpoint cannot be used.
    """

    def __init__(self, config: KVEventsConfig, replica: int) -> None:
        self._config = config
        self._replica = replica
        self._topic = config.topic.encode()
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps if config.replay_endpoint else 1)
        self._number = 0
        self._is_losing = self._is_closing = False
        self._linger = 0
        self._asking: deque[tuple[bytes, int]] = deque()  # (peer, number of the first message that it wants)
        self._answer: deque[list[bytes]] = deque()  # the rest of the answer that is sent now
        self._answer_time = 0.0  # when the peer took a message of it
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events = self._open(zmq.XPUB, config.endpoint, config.hwm)
        self._events.setsockopt(zmq.XPUB_MANUAL, 1)  # `_record_subscription` accepts only those to the topic
        self._replay = None
        if config.replay_endpoint is not None:
            self._replay = self._open(zmq.ROUTER, config.replay_endpoint, MAX_REPLAYED)
            self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an error, if no more messages may wait for a peer
        self._wake = os.eventfd(0)
        self.publish([CLEARED])  # before the thread can answer a request for the messages so far
        self._thread = threading.Thread(target=self._run, name="inflight-kv-events", daemon=True)
        self._thread.start()

    def _open(self, kind: int, endpoint: str, max_messages: int) -> zmq.Socket[bytes]:
        address, _, port = endpoint.rpartition(":")
        endpoint = f"{address}:{int(port) + self._replica}"
        opened = self._context.socket(kind)
        opened.set_hwm(max_messages)
        opened.setsockopt(zmq.MAXMSGSIZE, MAX_RECEIVED_BYTES)
        opened.setsockopt(zmq.IPV6, "[" in address)
        try:
            if kind == zmq.ROUTER or is_bound(endpoint):
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
            if not self._is_losing:
                logger.warning("messages about the prefix cache are lost from number %d on: too many wait", number)
            self._is_losing = True
            return
        self._is_losing = False
        self._waiting.append((number, msgspec.msgpack.encode((time.time(), events, self._replica))))
        os.eventfd_write(self._wake, 1)

    def close(self, linger: int = 100) -> None:
        """Publish what waits, and end the thread. Waits at most `linger` milliseconds for subscribers that read slowly."""
        self._linger = linger
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        poller = zmq.Poller()
        for awaited in filter(None, (self._wake, self._events, self._replay)):
            poller.register(awaited, zmq.POLLIN)
        while not self._is_closing:
            ready = dict(poller.poll(POLL_MILLISECONDS if self._answer else None))
            if self._wake in ready:
                os.eventfd_read(self._wake)
                self._send_waiting()
            if self._events in ready:
                self._record_subscription(self._events.recv())
            if self._replay is not None and self._replay in ready:
                self._take_question(self._replay)
            if self._replay is not None:
                self._send_again(self._replay)
        self._send_waiting()
        self._context.destroy(linger=self._linger)

    def _record_subscription(self, frame: bytes) -> None:
        subscribes = frame[:1] == b"\x01"
        topic = frame[1:]
        if frame[:1] not in (b"\x00", b"\x01") or not self._topic.startswith(topic):
            return  # otherwise a peer could fill the memory with topics
        self._events.setsockopt(zmq.SUBSCRIBE if subscribes else zmq.UNSUBSCRIBE, topic)
        if subscribes and self._kept and self._kept[-1][0] == 0:
            self._send(*self._kept[-1])

    def _send_waiting(self) -> None:
        while self._waiting:
            self._kept.append(self._waiting.popleft())
            self._send(*self._kept[-1])

    def _send(self, number: int, payload: bytes) -> None:
        self._events.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    def _take_question(self, replay: zmq.Socket[bytes]) -> None:
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.debug("a request for events of the prefix cache is not one number of 8 bytes")
        elif len(self._asking) >= MAX_ASKING or any(peer == frames[0] for peer, _ in self._asking):
            logger.debug("a request for events of the prefix cache is dropped: too many wait")
        else:
            self._asking.append((frames[0], int.from_bytes(frames[2], "big")))

    def _send_again(self, replay: zmq.Socket[bytes]) -> None:
        """Send older messages, as many as the peer takes. So one answer at a time is in memory, and a peer that does not read
        has at most MAX_REPLAYED messages."""
        while self._answer or self._asking:
            if not self._answer:
                peer, first = self._asking.popleft()
                kept = [
                    [peer, b"", number.to_bytes(8, "big"), payload] for number, payload in self._kept if number >= first
                ]
                self._answer.extend([*kept, [peer, b"", END, b""]])
                self._answer_time = time.monotonic()
            try:
                while self._answer:
                    replay.send_multipart(self._answer[0], zmq.DONTWAIT)
                    self._answer.popleft()
                    self._answer_time = time.monotonic()
            except zmq.Again:
                if time.monotonic() - self._answer_time < MAX_UNREAD_SECONDS:
                    return
                self._answer.clear()
            except zmq.ZMQError:  # the peer has left
                self._answer.clear()
