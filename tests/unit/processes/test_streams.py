"""`IoStream` and its I/O thread, `BlockingStream` and `use_heartbeats`, over socket pairs and TCP."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from inflight.errors import CodecError
from inflight.interface.codec import Message, encode
from inflight.interface.framing import Buffer
from inflight.interface.messages import RpcCall
from inflight.interface.start_up import Ready, Refused
from inflight.processes.io_thread import IoThread
from inflight.processes.streams import BlockingStream, IoStream, use_heartbeats, with_stream
from inflight.sockets import listen


@pytest.fixture
def io_thread() -> Iterator[IoThread]:
    io_thread = IoThread("test-io")
    io_thread.start()
    yield io_thread
    io_thread.stop()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with listen("127.0.0.1", 0) as listener:
        theirs = socket.create_connection(listener.getsockname(), timeout=300)
        theirs.settimeout(None)
        ours, _ = listener.accept()
    return ours, theirs


class Link:
    """An `IoStream`, what it has received, why it has ended, and the socket of its peer."""

    def __init__(
        self, io_thread: IoThread, pair: tuple[socket.socket, socket.socket] | None = None, **options: Any
    ) -> None:
        self.io_thread = io_thread
        self.ours, self.theirs = pair or socket.socketpair()
        self.received: SimpleQueue[Message] = SimpleQueue()
        self.ends: SimpleQueue[str] = SimpleQueue()
        self.on_message: Callable[[Message], None] = self.received.put
        self.stream = io_thread.run(lambda: self._begin(options))

    def _begin(self, options: dict[str, Any]) -> IoStream:
        stream = IoStream(self.io_thread.loop, self.ours, **options)
        stream.on_message, stream.on_end = lambda message: self.on_message(message), self.ends.put
        return stream

    def peer(self) -> BlockingStream:
        return BlockingStream(self.theirs)

    def calls_are_done(self) -> None:
        """Wait for all that the I/O thread had to do until now."""
        self.io_thread.run(lambda: None)

    def close(self) -> None:
        self.io_thread.run(self.stream.close)
        self.theirs.close()


@pytest.fixture
def link(io_thread: IoThread) -> Iterator[Link]:
    link = Link(io_thread)
    yield link
    link.close()


def large(number: int, num_arrays: int = 1, size: int = 2**20) -> RpcCall:
    """A message whose arrays do not fit into a socket's buffer."""
    arrays = tuple(np.full(size, number + index, np.int32) for index in range(num_arrays))
    return RpcCall(epoch=0, call_id=number, method="load", args=arrays, kwargs={})


def buffers(*messages: Message) -> list[Buffer]:
    return [buffer for message in messages for buffer in encode(message).buffers()]


def check_call(message: object, number: int, num_arrays: int = 1, size: int = 2**20) -> None:
    assert isinstance(message, RpcCall) and message.call_id == number
    assert len(message.args) == num_arrays
    for index, array in enumerate(message.args):
        assert array.shape == (size,) and (array == number + index).all()


def test_a_stream_sends_in_order_what_its_peer_reads_later(link: Link) -> None:
    """`send` never waits: the I/O thread sends what the socket does not accept at once."""
    link.stream.send(buffers(large(1)))
    link.stream.send(buffers(Ready(rank=2), large(3)))
    peer = link.peer()
    check_call(peer.receive(), 1)
    assert peer.receive() == Ready(rank=2)
    check_call(peer.receive(), 3)
    assert not link.io_thread.run(lambda: link.io_thread.loop.remove_writer(link.ours))  # nothing is left to be written
    link.stream.send(buffers(Ready(rank=4)))
    assert peer.receive() == Ready(rank=4)


def test_a_socket_that_accepts_nothing_gets_the_bytes_later(link: Link) -> None:
    num_before = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            num_before += link.ours.send(bytes(2**16))
    link.stream.send(buffers(Ready(rank=1)))
    assert len(link.theirs.recv(num_before, socket.MSG_WAITALL)) == num_before
    assert link.peer().receive() == Ready(rank=1)


def test_what_the_socket_accepts_is_sent_at_once(link: Link) -> None:
    """Not by another thread, which would have to wake first."""

    def send() -> bytes:
        link.stream.send([b"here"])
        return link.theirs.recv(100, socket.MSG_DONTWAIT)

    assert link.io_thread.run(send) == b"here"


def test_any_number_of_buffers_is_sent(link: Link) -> None:
    """The kernel takes at most 1024 at once."""
    link.stream.send([bytes([number % 256]) for number in range(3000)])
    assert link.theirs.recv(3000, socket.MSG_WAITALL) == bytes(number % 256 for number in range(3000))
    link.peer().send(large(5, num_arrays=1100, size=2000))
    check_call(link.received.get(timeout=300), 5, 1100, 2000)


def test_a_stream_receives_what_its_peer_sends(link: Link) -> None:
    peer = link.peer()
    for message in (Ready(rank=1), large(2), Ready(rank=3)):
        peer.send(message)
    assert link.received.get(timeout=300) == Ready(rank=1)
    check_call(link.received.get(timeout=300), 2)
    assert link.received.get(timeout=300) == Ready(rank=3)
    assert link.ends.empty()


def _leaves(link: Link) -> None:
    link.theirs.close()


def _sends_nonsense(link: Link) -> None:
    link.theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")


def _sends_another_type(link: Link) -> None:
    link.peer().send(Refused(reason="no"))


def _sends_too_much(link: Link) -> None:
    link.peer().send(Refused(reason="x" * 2000))


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (_leaves, "it closed its stream"),
        (_sends_nonsense, "it sent a damaged frame: a frame begins with b'GET '"),
        (_sends_another_type, "it sent a damaged frame: "),
        (_sends_too_much, "it sent a damaged frame: a frame has 20"),
    ],
)
def test_why_a_stream_has_ended(io_thread: IoThread, act: Callable[[Link], None], reason: str) -> None:
    link = Link(io_thread, allowed=(Ready,), max_frame_bytes=1000)
    descriptor = link.ours.fileno()
    act(link)
    assert link.ends.get(timeout=300).startswith(reason)
    assert not io_thread.run(lambda: io_thread.loop.remove_reader(descriptor))
    link.stream.send(buffers(Ready(rank=1)))  # does nothing
    link.stream.close()  # also
    assert link.received.empty() and link.ends.empty()
    link.close()


def test_what_is_allowed_may_change(io_thread: IoThread) -> None:
    link = Link(io_thread, allowed=(Ready,), max_frame_bytes=1000)
    link.stream.allowed = (Refused,)
    io_thread.run(lambda: link.stream.allow_frames_of(3000))
    _sends_too_much(link)
    assert link.received.get(timeout=300) == Refused(reason="x" * 2000)
    link.close()


def test_a_link_that_was_reset_is_lost(io_thread: IoThread) -> None:
    link = Link(io_thread, tcp_pair())
    link.theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, (1).to_bytes(4, "little") + bytes(4))
    link.theirs.close()
    assert link.ends.get(timeout=300) == "its stream was lost: Connection reset by peer"
    link.close()


def test_a_message_to_a_peer_that_has_gone_is_dropped(link: Link) -> None:
    def send() -> None:  # in the I/O thread, which cannot have seen the end of the stream
        link.theirs.close()
        link.stream.send(buffers(Ready(rank=1)))

    link.io_thread.run(send)
    assert link.ends.get(timeout=300) in ("it closed its stream", "its stream was lost: Connection reset by peer")


def test_a_stream_that_is_closed_by_a_message_receives_no_more(link: Link) -> None:
    """Also if the message cannot be taken in: whoever closes a stream does not want to hear of its end."""

    def take_in(message: Message) -> None:
        link.received.put(message)
        link.stream.close()
        raise ZeroDivisionError

    link.on_message = take_in
    link.theirs.sendall(b"".join(buffers(Ready(rank=1), Ready(rank=2))))
    assert link.peer().receive() is None
    link.calls_are_done()
    assert link.received.get(timeout=300) == Ready(rank=1)
    assert link.received.empty() and link.ends.empty()


def test_a_closed_stream_drops_the_messages_that_were_read_with_the_last_one(link: Link) -> None:
    def take_in(message: Message) -> None:
        link.received.put(message)
        link.stream.close()

    link.on_message = take_in
    link.theirs.sendall(b"".join(buffers(Ready(rank=1), Ready(rank=2))))
    assert link.peer().receive() is None
    link.calls_are_done()
    assert link.received.get(timeout=300) == Ready(rank=1)
    assert link.received.empty() and link.ends.empty()


def test_a_stream_can_be_closed_while_it_sends(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    descriptor = link.ours.fileno()

    def send_and_close() -> None:
        link.stream.send(buffers(large(1)))
        link.stream.close()  # before the I/O thread begins to write the rest

    link.io_thread.run(send_and_close)
    link.calls_are_done()
    assert not link.io_thread.run(lambda: link.io_thread.loop.remove_writer(descriptor))
    assert not caplog.records


def test_a_stream_is_closed_that_has_bytes_to_write(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    descriptor = link.ours.fileno()
    link.stream.send(buffers(large(1)))
    link.calls_are_done()
    link.io_thread.run(link.stream.close)
    assert not link.io_thread.run(lambda: link.io_thread.loop.remove_writer(descriptor))
    assert not caplog.records


def test_a_stream_can_be_closed_after_the_io_thread() -> None:
    io_thread = IoThread("test-io")
    io_thread.start()
    ours, theirs = socket.socketpair()
    stream = io_thread.run(lambda: IoStream(io_thread.loop, ours))
    io_thread.stop()
    stream.close()
    with theirs:
        assert theirs.recv(1) == b""


def test_all_that_a_dead_peer_has_sent_can_be_read_at_once(link: Link) -> None:
    def die_and_drain() -> list[int]:  # in the I/O thread, which has not read anything meanwhile
        for rank in range(3):
            link.theirs.sendall(b"".join(buffers(Ready(rank=rank))))
        link.theirs.sendall(b"".join(buffers(*[Refused(reason="x" * 60_000)] * 3)))  # more than one read
        if is_dead:
            link.theirs.close()
        link.stream.drain()
        return [link.received.qsize(), link.ends.qsize()]

    is_dead = False
    assert link.io_thread.run(die_and_drain) == [6, 0]
    is_dead = True
    assert link.io_thread.run(die_and_drain) == [12, 1]
    link.io_thread.run(link.stream.drain)  # does nothing


def test_a_detached_socket_is_still_connected(link: Link) -> None:
    taken = link.io_thread.run(link.stream.detach)
    assert link.ours.fileno() == -1
    with taken:
        taken.sendall(b"here")
        assert link.theirs.recv(4, socket.MSG_WAITALL) == b"here"
    link.calls_are_done()
    assert link.ends.empty()


def test_a_process_gets_the_other_end_of_its_stream(io_thread: IoThread) -> None:
    received: SimpleQueue[Message] = SimpleQueue()
    ends: SimpleQueue[str] = SimpleQueue()

    def begin() -> tuple[int, IoStream]:
        descriptor, stream = with_stream(io_thread, os.dup)  # a new process has its own descriptor
        stream.on_message, stream.on_end = received.put, ends.put
        return descriptor, stream

    descriptor, stream = io_thread.run(begin)
    peer = BlockingStream(socket.socket(fileno=descriptor))
    peer.send(Ready(rank=1))
    assert received.get(timeout=300) == Ready(rank=1)
    stream.send(buffers(Ready(rank=2)))
    assert peer.receive() == Ready(rank=2)
    peer.close()
    assert ends.get(timeout=300) == "it closed its stream"  # so nobody else has this end


def test_a_message_that_cannot_be_taken_in_ends_its_stream(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    """Else nobody would read the stream any more, and its rank would be silent until a budget ends."""

    def take_in(message: Message) -> None:
        raise ZeroDivisionError("a defect")

    link.on_message = take_in
    peer = link.peer()
    peer.send(Ready(rank=0))
    assert link.ends.get(timeout=300) == "its message cannot be processed: ZeroDivisionError('a defect')"
    assert peer.receive() is None
    assert "Traceback" in caplog.text


def test_an_abort_resets_the_link(io_thread: IoThread) -> None:
    ours, theirs = tcp_pair()
    stream = io_thread.run(lambda: IoStream(io_thread.loop, ours))
    io_thread.run(stream.abort)
    with theirs, pytest.raises(ConnectionResetError):
        theirs.recv(1)
    stream.abort()  # does nothing


def test_messages_that_arrive_together_are_received_one_after_another() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with ours, theirs:
        stream = BlockingStream(theirs)
        assert theirs.getblocking()
        ours.sendall(b"".join(buffers(Ready(rank=1), Ready(rank=2), Refused(reason="no"))))
        assert [stream.receive(), stream.receive()] == [Ready(rank=1), Ready(rank=2)]
        with pytest.raises(CodecError):
            stream.receive((Ready,))
        ours.close()
        assert stream.receive() is None
        stream.close()
        assert theirs.fileno() == -1


def test_a_stream_leaves_bytes_to_the_next_reader_of_its_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"".join(buffers(Ready(rank=1))) + b"rest")
        assert BlockingStream(theirs, read_ahead=False).receive() == Ready(rank=1)
        assert theirs.recv(100) == b"rest"


@pytest.mark.parametrize(("seconds", "used"), [(7.4, 7), (7.6, 8), (0.2, 1)])
def test_the_kernel_probes_a_tcp_link_every_second(seconds: float, used: int) -> None:
    ours, theirs = tcp_pair()
    with ours, theirs:
        use_heartbeats(ours, seconds)
        tcp = socket.IPPROTO_TCP
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and ours.getsockopt(tcp, socket.TCP_NODELAY)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        assert [ours.getsockopt(tcp, option) for option in options] == [1, 1, used, used * 1000]


def test_a_unix_socket_is_not_probed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        use_heartbeats(ours, 7.0)
        assert not ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
