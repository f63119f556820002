"""The front end's end of the socket to the command."""

from __future__ import annotations

import asyncio
import socket

import pytest

from inflight.entrypoints.serve.front_end_main import ENGINE, EXIT_COMMAND_GONE, GONE, Control
from inflight.entrypoints.serve.shutdown import Shutdown
from inflight.errors import EngineDeadError
from tests.unit.engine.serving.event_loop import run


def test_a_replica_that_is_gone_may_come_back() -> None:
    """The order says that it was given up. If it is on another machine, it may only be away, and a socket to it follows."""

    async def test() -> None:
        ours, theirs = socket.socketpair()
        control = Control(theirs, Shutdown(1.0), 2)
        sent, other = socket.socketpair()
        with ours, theirs, sent, other:
            ours.send(bytes([GONE + 1]))
            with pytest.raises(EngineDeadError) as caught:
                await asyncio.wait_for(control.engine_sockets[1].get(), 60)
            assert str(caught.value) == "the engine was given up, or its machine is away"
            socket.send_fds(ours, [bytes([ENGINE + 1])], [sent.fileno()])
            with await asyncio.wait_for(control.engine_sockets[1].get(), 60) as given:
                given.send(b"to the engine")
                assert other.recv(100) == b"to the engine"
            control.close()

    run(test)


def test_a_front_end_does_not_outlive_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    shutdown, codes = Shutdown(1.0), list[int]()
    monkeypatch.setattr(shutdown, "cut_now", codes.append)

    async def test() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            Control(theirs, shutdown, 1)
            ours.close()  # as the kernel does when the command is killed
            while not codes:
                await asyncio.sleep(0.001)

    run(test)
    assert codes == [EXIT_COMMAND_GONE]
