"""What a subscriber of ZeroMQ gets, read as vLLM's own subscribers read it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
import pytest
import zmq

from benchmarks.shared.free_port import free_port
from inflight.config.kv_events import KVEventsConfig
from inflight.engine.process import kv_event_publisher
from inflight.engine.process.kv_event_publisher import KVEventPublisher
from inflight.errors import ConfigError
from inflight.interface.block_events import BlockEvent, blocks_removed, blocks_stored
from tests.support.kv_event_stream import MILLISECONDS, AllBlocksCleared, Batch, BlocksRemoved, BlockStored, connect


def ports() -> tuple[int, int]:
    """Two free ports."""
    return free_port(), free_port()


@contextmanager
def published(
    replica: int = 0, **fields: int | str
) -> Iterator[tuple[KVEventPublisher, zmq.Context[zmq.Socket[bytes]], KVEventsConfig]]:
    first, second = ports()
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"tcp://*:{first - replica}",
        replay_endpoint=f"tcp://127.0.0.1:{second - replica}",
        topic="kv",
        **fields,  # type: ignore[arg-type]  # the fields that are numbers
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = KVEventPublisher(config, replica)
    try:
        yield publisher, context, config
    finally:
        if publisher._thread.is_alive():
            publisher.close()
        context.destroy(linger=0)


def stored(number: int) -> BlockEvent:
    return blocks_stored(number, None, [1, 2])


def replayed(socket: zmq.Socket[bytes], first: int) -> list[tuple[int, Batch]]:
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    found = []
    while True:
        _, number, payload = socket.recv_multipart()
        if number == kv_event_publisher.END:
            assert payload == b""
            return found
        found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=Batch)))


def test_a_subscriber_reads_events_and_asks_for_those_that_it_lacks() -> None:
    with published(replica=1) as (publisher, context, config):
        subscriber = connect(context, zmq.SUB, config.endpoint, replica=1)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
        subscriber.setsockopt(zmq.RCVTIMEO, 50)
        number = -1
        for number in range(2400):  # until the subscription has arrived
            publisher.publish([stored(2**64 - 1 - number), blocks_removed([7])])
            try:
                topic, got, payload = subscriber.recv_multipart()
            except zmq.Again:
                continue
            if int.from_bytes(got, "big") > 0:  # message 0 says that the cache is empty
                break
        batch = msgspec.msgpack.decode(payload, type=Batch)
        assert topic == b"kv" and abs(batch.ts - time.time()) < 600 and batch.data_parallel_rank == 1
        index = int.from_bytes(got, "big")
        assert batch.events == [
            BlockStored([2**64 - index], None, [1, 2], 2, None, "GPU", None),
            BlocksRemoved([7], "GPU"),
        ]
        replay = connect(context, zmq.DEALER, str(config.replay_endpoint), replica=1)
        everything = replayed(replay, 0)
        assert [each for each, _ in everything] == list(range(number + 2))
        assert everything[0][1].events == [AllBlocksCleared()]
        assert replayed(replay, number + 1) == everything[-1:]
        replay.send_multipart([b"", b"what"])
        assert replayed(replay, number + 2) == [], "a bad question has no answer, and does no harm"


def test_no_request_is_answered_before_the_first_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that asks while the process starts would think that nothing was published."""
    publish = KVEventPublisher.publish

    def publish_late(publisher: KVEventPublisher, events: list[BlockEvent]) -> None:
        with (
            zmq.Context[zmq.Socket[bytes]]() as asking,
            connect(asking, zmq.DEALER, str(publisher._config.replay_endpoint)) as replay,
        ):
            replay.send_multipart([b"", bytes(8)])
            is_answered = replay.poll(200)
        assert not is_answered
        publish(publisher, events)

    monkeypatch.setattr(KVEventPublisher, "publish", publish_late)
    with published():
        pass


def subscribe(context: zmq.Context[zmq.Socket[bytes]], config: KVEventsConfig) -> zmq.Socket[bytes]:
    subscriber = connect(context, zmq.SUB, config.endpoint)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
    return subscriber


def test_each_subscriber_of_a_new_process_hears_that_the_cache_is_empty() -> None:
    with published() as (publisher, context, config):
        subscribers = [subscribe(context, config) for _ in range(2)]
        assert [each.recv_multipart()[1] for each in subscribers] == [bytes(8), bytes(8)]
        publisher.publish([stored(1)])
        replay = connect(context, zmq.DEALER, str(config.replay_endpoint))
        while len(replayed(replay, 0)) < 2:
            pass
        late = subscribe(context, config)
        late.setsockopt(zmq.RCVTIMEO, 50)
        while True:  # until its subscription has arrived
            publisher.publish([stored(2)])
            with suppress(zmq.Again):
                assert int.from_bytes(late.recv_multipart()[1], "big") > 1, "it would think that block 1 has left"
                break


def test_a_replay_ends_however_few_messages_may_wait() -> None:
    with published(hwm=1, buffer_steps=500) as (publisher, context, config):
        for number in range(800):
            publisher.publish([stored(number)])
        replay = connect(context, zmq.DEALER, str(config.replay_endpoint))
        while replayed(replay, 0)[-1][0] < 800:
            pass
        for _ in range(20):
            assert [number for number, _ in replayed(replay, 0)] == list(range(301, 801))


def test_a_peer_that_sends_much_is_cut_off() -> None:
    with published() as (_, context, config):
        replay = connect(context, zmq.DEALER, str(config.replay_endpoint))
        monitor = replay.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        replay.send_multipart([b"", bytes(100_000)])
        assert monitor.poll(MILLISECONDS)
        other = connect(context, zmq.DEALER, str(config.replay_endpoint))
        assert replayed(other, 0)[0][0] == 0


def test_what_was_published_last_is_sent_at_the_end() -> None:
    for _ in range(20):
        with published() as (publisher, context, config):
            subscriber = subscribe(context, config)
            assert subscriber.recv_multipart()[1] == bytes(8)
            publisher.publish([stored(1)])
            publisher.close(linger=300_000)
            while (number := subscriber.recv_multipart()[1]) == bytes(8):
                pass  # it comes twice, if the subscriber is there before the first message
            assert int.from_bytes(number, "big") == 1


def test_only_so_many_messages_are_kept() -> None:
    with published(buffer_steps=3) as (publisher, context, config):
        for number in range(9):
            publisher.publish([stored(number)])
        replay = connect(context, zmq.DEALER, str(config.replay_endpoint))
        while (found := [each for each, _ in replayed(replay, 0)]) != [7, 8, 9]:
            assert len(found) <= 3


def test_a_queue_that_is_full_loses_a_message_and_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVEventPublisher, "_run", lambda self: None)  # nobody sends
    with published(max_queue_size=2) as (publisher, _, _config):
        for number in range(3):  # with the first message, that the cache is empty
            publisher.publish([stored(number)])
        assert [number for number, _ in publisher._waiting] == [0, 1]
        publisher._waiting.popleft()
        publisher.publish([stored(9)])
        assert [number for number, _ in publisher._waiting] == [1, 4]
        publisher._context.destroy(linger=0)


def test_subscriptions_to_other_topics_are_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    accepted: list[tuple[int, bytes]] = []

    class Recorder:
        def setsockopt(self, option: int, topic: bytes) -> None:
            accepted.append((option, topic))

    with published() as (publisher, _, _config):
        publisher._kept.clear()  # nothing is sent again
        with monkeypatch.context() as patch:
            patch.setattr(publisher, "_events", Recorder())  # no peer has connected, so the thread does not use it
            for frame in (b"\x01other", b"\x01kv@", b"\x01", b"\x01kv", b"\x00k", b"", b"\x02garbage"):
                publisher._record_subscription(frame)
    subscribe, unsubscribe = zmq.SUBSCRIBE, zmq.UNSUBSCRIBE
    assert accepted == [(subscribe, b""), (subscribe, b"kv"), (unsubscribe, b"k")]


def test_ipv6() -> None:
    port = free_port()
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://[::]:{port}")
    try:
        publisher = KVEventPublisher(config, 0)
    except ConfigError:
        with pytest.raises(OSError, match="ddress"):
            socket.create_server(("::", port), family=socket.AF_INET6)
        pytest.skip("this machine has no IPv6")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        subscriber = connect(context, zmq.SUB, config.endpoint)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        assert subscriber.recv_multipart()[1] == bytes(8)
    finally:
        publisher.close()
        context.destroy(linger=0)


def test_a_port_that_is_taken() -> None:
    message = r"tcp://\*:\d+ cannot be used: Address already in use .*; give an address"
    with published() as (_, _context, config), pytest.raises(ConfigError, match=message):
        KVEventPublisher(config, 0)


def test_peers_that_do_not_read_take_little_memory_and_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer at a time is in memory; an answer that nobody reads ends."""
    monkeypatch.setattr(kv_event_publisher, "MAX_UNREAD_SECONDS", 0.5)
    with published(buffer_steps=2000) as (publisher, context, config):
        for number in range(1, 2000):
            publisher.publish([blocks_stored(number, None, list(range(1000)))])
        assert config.replay_endpoint is not None
        deaf = []
        for _ in range(3):
            deaf.append(connect(context, zmq.DEALER, config.replay_endpoint, max_waiting=1))
            deaf[-1].send_multipart([b"", bytes(8)])
        # a thread of zmq reads for it, so it need not be quick
        reader = connect(context, zmq.DEALER, config.replay_endpoint, max_waiting=0)
        found = replayed(reader, 5)
        assert [number for number, _ in found] == list(range(5, 2000))
        assert len(publisher._asking) + len(publisher._answer) <= 3 + 2001
        assert [number for number, _ in replayed(reader, 1990)] == list(range(1990, 2000)), "and again"


def test_requests_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Peer:
        def __init__(self) -> None:
            self.number = 0

        def recv_multipart(self) -> list[bytes]:
            self.number += 1
            return [b"%d" % (self.number // 2), b"", bytes(8)]  # each of them asks twice

    with published() as (publisher, _, _config):
        peer = Peer()
        for _ in range(1000):
            publisher._take_question(peer)  # type: ignore[arg-type]
        assert len(publisher._asking) == kv_event_publisher.MAX_ASKING == len({each for each, _ in publisher._asking})
        publisher._asking.clear()
