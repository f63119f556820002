"""`Stream` and the reactor, over a socket pair."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from inflight.executor.reactor import Reactor
from inflight.executor.transport import BlockingStream, Stream
from inflight.interface.codec import Message
from inflight.interface.start_up import Ready


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    reactor = Reactor("test-io")
    reactor.start()
    yield reactor
    reactor.stop()


def test_a_message_that_cannot_be_taken_in_ends_its_stream(reactor: Reactor, caplog: pytest.LogCaptureFixture) -> None:
    """Else nobody would read the stream any more, and its rank would be silent until a budget ends."""
    ours, theirs = socket.socketpair()
    ends: SimpleQueue[str] = SimpleQueue()

    def take_in(message: Message) -> None:
        raise ZeroDivisionError("a defect")

    def begin() -> None:
        stream = Stream(reactor, ours)
        stream.on_message, stream.on_end = take_in, ends.put

    reactor.run(begin)
    peer = BlockingStream(theirs)
    peer.send(Ready(rank=0))
    assert ends.get(timeout=5) == "what it sent cannot be processed: ZeroDivisionError('a defect')"
    assert peer.receive() is None
    assert "Traceback" in caplog.text
    peer.close()
