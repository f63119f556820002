"""The control socket: what `EngineProcess` says, `ControlSocket` understands, and the other way round."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.engine.process.control_socket import Begin, ControlSocket
from inflight.engine.process.engine_process import EngineProcess
from inflight.interface.serving import AbortRequests, EngineReady
from inflight.interface.statistics import FaultStatus
from inflight.processes.line_wire import LineWire
from inflight.processes.streams import BlockingStream
from tests.unit.engine.serving.event_loop import run


@pytest.fixture
def ends() -> Iterator[tuple[Any, ControlSocket]]:
    """An `EngineProcess` without a process, and the end of its core. `heard` and `removed` are what it has noted."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    process: Any = object.__new__(EngineProcess)
    process._control, process._wire, process.sockets = ours, LineWire(ours), {}
    process.is_ready = process.has_ended = False
    process.faults, process.lone_request, process._unconnected = None, "", []
    process.heard, process.removed = [], []
    process._pings = SimpleNamespace(heard=process.heard.append)
    process._loop = SimpleNamespace(remove_reader=process.removed.append)
    process._has_news = asyncio.Event()
    process.process = SimpleNamespace(pidfd=-1)
    with ours, theirs:
        yield process, ControlSocket(theirs)
    for each in process.sockets.values():
        each.close()


def test_the_core_learns_the_past_and_each_front_end_gets_its_socket(ends: tuple[Any, ControlSocket]) -> None:
    process, control = ends
    past = FaultStatus(num_recoveries={"engine_died": 2}, last_cause="a lost engine", epoch=3)
    process.begin((4, 7), past, 12.5, ("a", "b"), (3.5, 9.0))
    links = []
    for number in (4, 7):
        arrived = control.receive()
        assert isinstance(arrived, tuple)
        assert (arrived[0].index, arrived[0].num_received, arrived[1]) == (number, 0, 0)
        links.append(arrived[0])
    assert control.receive() == Begin(past, 12.5, frozenset({"a", "b"}), (3.5, 9.0))
    late = process.connect(9, 5)
    arrived = control.receive()
    assert isinstance(arrived, tuple) and (arrived[0].index, arrived[1]) == (9, 5)
    links.append(arrived[0])
    for link, own in zip(links, (process.sockets[4], process.sockets[7], late), strict=True):
        stream = BlockingStream(own)
        ready = EngineReady(front_end=link.index, num_kv_cache_tokens=1)
        link.outbox.send(ready)
        assert stream.receive((EngineReady,)) == ready  # no socket was given to another front end
        stream.send(AbortRequests(request_ids=("x",)))
        assert link.stream.receive((AbortRequests,)) == AbortRequests(request_ids=("x",))
        link.outbox.close(5.0)
        link.stream.close()
    late.close()


def test_without_a_past_the_core_begins_with_none(ends: tuple[Any, ControlSocket]) -> None:
    process, control = ends
    process.begin(())
    assert control.receive() == Begin(FaultStatus(), 0.0, frozenset(), ())


def test_what_comes_in_one_read_keeps_its_order(ends: tuple[Any, ControlSocket]) -> None:
    """A front end may come at once after `begin`."""
    process, control = ends
    process.begin(())
    own = process.connect(9, 5)
    assert isinstance(control.receive(), Begin)
    arrived = control.receive()
    assert isinstance(arrived, tuple) and (arrived[0].index, arrived[1]) == (9, 5)
    arrived[0].outbox.close(5.0)
    arrived[0].stream.close()
    own.close()


def test_pings_are_answered_while_the_core_waits_for_a_front_end(ends: tuple[Any, ControlSocket]) -> None:
    process, control = ends
    for _ in range(3):
        process._ping(0)
    process.begin(())
    assert isinstance(control.receive(), Begin)
    process._read()
    assert process.heard == [0, 0, 0]
    process._control.close()
    assert control.receive() is None  # the owner is gone


def test_what_the_core_says_is_understood_however_it_is_cut(ends: tuple[Any, ControlSocket]) -> None:
    """A read may end in the middle of a line, and may bring several lines."""
    process, control = ends
    faults = FaultStatus(num_recoveries={"rank_died": 1}, last_cause="é", state="recovering")
    said: list[dict[str, object]] = [
        {"pong": True},
        {"lone_request": "a"},
        {
            "faults": {"num_recoveries": {"rank_died": 1}, "last_cause": "é", "state": "recovering"},
            "recovery_times": [2.5],
        },
        {"unconnected": 3},
        {"ready": True},
    ]
    text = b"".join(json.dumps(each).encode() + b"\n" for each in said)
    for cut in range(1, len(text)):
        process.is_ready, process.faults, process.lone_request = False, None, ""
        process.heard.clear()
        process._has_news.clear()
        control._socket.sendall(text[:cut])
        process._read()
        assert not process.is_ready and not process._has_news.is_set()
        control._socket.sendall(text[cut:])
        process._read()
        assert (process.is_ready, process.lone_request, process.faults, process.heard) == (True, "a", faults, [0])
        assert (process.recovery_times, process.take_unconnected()) == ((2.5,), [3])
        assert process.take_unconnected() == []
        assert process._has_news.is_set()  # so the keeper looks at once
    control.send({"lone_request": ""})
    process._read()
    assert process.lone_request == "" and process.removed == []
    control._socket.close()
    process._read()
    assert process.removed == [process._control]  # otherwise the event loop would be woken for ever


def test_a_socket_that_finds_no_free_descriptor_is_asked_for_again(
    ends: tuple[Any, ControlSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel delivers the message, but drops the socket. The control thread must go on, or the core is killed as hung."""
    process, control = ends
    receive = socket.recv_fds

    def without_descriptors(*args: Any) -> Any:
        content, fds, *rest = receive(*args)
        for fd in fds:
            os.close(fd)
        return content, [], *rest

    with monkeypatch.context() as patched:
        patched.setattr(socket, "recv_fds", without_descriptors)
        lost = process.connect(9, 5)
        process.begin(())
        assert isinstance(control.receive(), Begin)
    assert lost.recv(1) == b""  # so the front end knows, and waits for another socket
    lost.close()
    process._read()
    assert process.take_unconnected() == [9]
    own = process.connect(9, 5)
    arrived = control.receive()
    assert isinstance(arrived, tuple) and (arrived[0].index, arrived[1]) == (9, 5)
    arrived[0].outbox.close(5.0)
    arrived[0].stream.close()
    own.close()


def test_a_front_end_that_cannot_be_connected_is_told_so(ends: tuple[Any, ControlSocket]) -> None:
    process, control = ends
    control._socket.close()
    assert process.connect(1, 0) is None


def test_waiting_for_news_ends_with_the_news_or_with_the_time(ends: tuple[Any, ControlSocket]) -> None:
    async def test() -> None:
        process, control = ends
        process._has_news = asyncio.Event()
        await process.wait_for_news(0.001)
        control.send({"ready": True})
        process._read()
        await asyncio.wait_for(process.wait_for_news(1000.0), 300)
        assert not process._has_news.is_set()  # the next call waits for other news
        process._record_end()
        assert process.has_ended and process.removed == [-1]
        await asyncio.wait_for(process.wait_for_news(1000.0), 300)

    run(test)
