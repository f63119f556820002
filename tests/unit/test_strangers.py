"""`Strangers`: who proves the token gets in, and nobody else costs more than a place in a bounded list."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from inflight import strangers as strangers_module
from inflight.handshake import RefusedError, address_bytes, introduce
from inflight.strangers import Strangers

TOKENS = {b"a": b"the token of a", b"b": b"the token of b"}


class Door:
    """Strangers behind a listener. Attributes: `dropped`: the reasons, in order."""

    def __init__(self, *, signs_address: bool = False) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.dropped: list[str] = []
        self.strangers = Strangers(b"test", 1, TOKENS.get, self._note, signs_address=signs_address)
        self.opened = contextlib.ExitStack()
        self.threads = ThreadPoolExecutor()

    def _note(self, connected: socket.socket, host: str, reason: str) -> None:
        assert connected.fileno() >= 0 and host in ("127.0.0.1", "")
        self.dropped.append(reason)

    def come(self, seconds: float = 300.0) -> tuple[socket.socket, socket.socket]:
        """A new stranger: its end, and ours."""
        theirs = self.opened.enter_context(socket.create_connection(self.listening.getsockname()))
        theirs.settimeout(300)
        ours = self.strangers.accept(self.listening, seconds)
        assert ours is not None
        return theirs, ours

    def prove(self, theirs: socket.socket, who: bytes, token: bytes, address: bytes = b"") -> Future[None]:
        return self.threads.submit(introduce, theirs, b"test", who, token, address)

    def receive(self, ours: socket.socket) -> bytes | None:
        """Read until the stranger is known or was dropped."""
        ours.setblocking(True)
        ours.settimeout(300)
        while ours in list(self.strangers):
            if (who := self.strangers.receive(ours)) is not None:
                return who
        return None

    def close(self) -> None:
        self.strangers.close()
        self.listening.close()
        self.opened.close()
        self.threads.shutdown()


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.close()


def test_who_proves_its_token_gets_in_and_the_connection_belongs_to_the_caller(door: Door) -> None:
    theirs, ours = door.come()
    proving = door.prove(theirs, b"b", TOKENS[b"b"])
    assert door.receive(ours) == b"b"
    proving.result(timeout=300)
    assert list(door.strangers) == [] and door.dropped == []
    ours.sendall(b"welcome")
    assert theirs.recv(7, socket.MSG_WAITALL) == b"welcome"
    ours.close()


@pytest.mark.parametrize(("who", "token"), [(b"a", TOKENS[b"b"]), (b"c", TOKENS[b"a"])])
def test_a_wrong_token_and_an_unknown_name_are_refused(door: Door, who: bytes, token: bytes) -> None:
    theirs, ours = door.come()
    proving = door.prove(theirs, who, token)
    assert door.receive(ours) is None
    with pytest.raises(RefusedError):
        proving.result(timeout=300)
    assert len(door.dropped) == 1 and ours.fileno() == -1


def test_a_half_answer_and_an_end_get_nobody_in(door: Door) -> None:
    theirs, ours = door.come()
    theirs.sendall(b"a" * 20)
    ours.setblocking(True)
    assert door.strangers.receive(ours) is None and list(door.strangers) == [ours]
    ours.setblocking(False)
    assert door.strangers.receive(ours) is None and list(door.strangers) == [ours], "there was nothing to read"
    theirs.close()
    assert door.receive(ours) is None
    assert len(door.dropped) == 1 and ours.fileno() == -1


def test_who_is_late_is_dropped_and_nobody_else(door: Door) -> None:
    _, early = door.come(0.0)
    _, late = door.come(1000.0)
    assert door.strangers.next_deadline <= time.monotonic()
    door.strangers.drop_late()
    assert list(door.strangers) == [late] and early.fileno() == -1
    assert 900 < door.strangers.next_deadline - time.monotonic() <= 1000


def test_one_too_many_costs_the_oldest_its_place(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers_module, "MAX_STRANGERS", 3)
    ours = [door.come()[1] for _ in range(5)]
    assert list(door.strangers) == ours[2:]
    assert [each.fileno() == -1 for each in ours] == [True, True, False, False, False]
    assert len(door.dropped) == 2


@pytest.mark.parametrize("is_relayed", [False, True])
def test_a_proof_for_another_address_is_worth_nothing(is_relayed: bool) -> None:
    door = Door(signs_address=True)
    theirs, ours = door.come()
    reached = address_bytes(("127.0.0.1", 1) if is_relayed else theirs.getpeername())
    proving = door.prove(theirs, b"a", TOKENS[b"a"], reached)
    assert door.receive(ours) == (None if is_relayed else b"a")
    assert (proving.exception(timeout=300) is not None) == is_relayed
    ours.close()
    door.close()
