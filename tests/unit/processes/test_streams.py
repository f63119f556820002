"""`IoStream` and its I/O thread, over a socket pair."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from inflight.interface.codec import Message
from inflight.interface.start_up import Ready
from inflight.processes.io_thread import IoThread
from inflight.processes.streams import BlockingStream, IoStream
from inflight.sockets import listen


@pytest.fixture
def io_thread() -> Iterator[IoThread]:
    io_thread = IoThread("test-io")
    io_thread.start()
    yield io_thread
    io_thread.stop()


def test_a_message_that_cannot_be_taken_in_ends_its_stream(
    io_thread: IoThread, caplog: pytest.LogCaptureFixture
) -> None:
    """Else nobody would read the stream any more, and its rank would be silent until a budget ends."""
    ours, theirs = socket.socketpair()
    ends: SimpleQueue[str] = SimpleQueue()

    def take_in(message: Message) -> None:
        raise ZeroDivisionError("a defect")

    def begin() -> None:
        stream = IoStream(io_thread, ours)
        stream.on_message, stream.on_end = take_in, ends.put

    io_thread.run(begin)
    peer = BlockingStream(theirs)
    peer.send(Ready(rank=0))
    assert ends.get(timeout=300) == "its message cannot be processed: ZeroDivisionError('a defect')"
    assert peer.receive() is None
    assert "Traceback" in caplog.text
    peer.close()


def test_an_abort_resets_the_link(io_thread: IoThread) -> None:
    with listen("127.0.0.1", 0) as listener:
        theirs = socket.create_connection(listener.getsockname(), timeout=300)
        ours, _ = listener.accept()
    stream = io_thread.run(lambda: IoStream(io_thread, ours))
    io_thread.run(stream.abort)
    with theirs, pytest.raises(ConnectionResetError):
        theirs.recv(1)
    stream.abort()  # does nothing
