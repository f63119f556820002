"""`LineWire`: messages arrive whole and in order, however they are cut, and descriptors with the messages that bring them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from inflight.processes import line_wire
from inflight.processes.line_wire import LineWire


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        yield ours, theirs


def test_messages_are_whole_and_in_order_however_they_are_cut(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    text = b'{"a": 1}\n"b"\n["\\u00e9"]\n'
    for cut in range(1, len(text)):
        wire, found = LineWire(theirs), list[Any]()
        for part in (text[:cut], text[cut:]):
            ours.sendall(part)
            found += wire.receive()
        assert found == [({"a": 1}, None), ("b", None), (["é"], None)]
        with pytest.raises(BlockingIOError):
            wire.receive()
    ours.close()
    with pytest.raises(EOFError):
        LineWire(theirs).receive()


def test_a_message_that_is_read_in_parts_keeps_its_descriptor(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    reading, writing = os.pipe()
    for num_bytes in range(1, 30):
        monkeypatch.setattr(line_wire, "READ_BYTES", num_bytes)
        sending, receiving = LineWire(ours), LineWire(theirs)
        sending.send("before")
        sending.send({"pipe": 1}, [reading])
        sending.send("after")
        found: list[Any] = []
        while len(found) < 3:
            found += receiving.receive()
        assert [message for message, _ in found] == ["before", {"pipe": 1}, "after"]
        assert [fd is not None for _, fd in found] == [False, True, False]
        os.close(found[1][1])
    os.close(reading)
    os.close(writing)


def test_a_descriptor_belongs_to_the_message_that_brings_it(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    sending, receiving = LineWire(ours), LineWire(theirs)
    reading, writing = os.pipe()
    sending.send("before")
    sending.send({"pipe": 1}, [reading])
    sending.send("between")
    sending.send({"pipe": 2}, [reading])
    sending.send("after")
    found: list[Any] = []
    while len(found) < 5:
        found += receiving.receive()
    assert [message for message, _ in found] == ["before", {"pipe": 1}, "between", {"pipe": 2}, "after"]
    assert [fd is not None for _, fd in found] == [False, True, False, True, False]
    os.write(writing, b"xy")
    assert [os.read(fd, 1) for _, fd in found if fd is not None] == [b"x", b"y"]
    for each in (reading, writing, *(fd for _, fd in found if fd is not None)):
        os.close(each)
