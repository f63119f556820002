"""Both sides of a connection prove the token: what a stranger, an impostor, a replay or a relay gets."""

from __future__ import annotations

import itertools
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from inflight.handshake import (
    GREETING_BYTES,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    REFUSED,
    Acceptance,
    ImpostorError,
    RefusedError,
    address_bytes,
    introduce,
)

TOKEN, WHO = b"the token of a test", b"rank"


def meet(acceptance: Acceptance, token: bytes | None, connector: tuple[bytes, bytes, bytes, bytes]) -> bytes | None:
    """Both sides over a socket pair. `connector`: purpose, who, token, address. Returns whom the acceptor has accepted."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        introducing = pool.submit(introduce, theirs, *connector)
        ours.sendall(acceptance.greeting)
        while acceptance.num_missing:
            acceptance.add(ours.recv(min(acceptance.num_missing, 7)))
        who, verdict = acceptance.judge(lambda who: token)
        ours.sendall(verdict)
        introducing.result(300)
    return who


def test_who_know_the_token_accept_each_other() -> None:
    for purpose, address in itertools.product((b"join", b"mesh"), (b"", b"127.0.0.1 5")):
        assert meet(Acceptance(purpose, 4, address), TOKEN, (purpose, WHO, TOKEN, address)) == WHO


@pytest.mark.parametrize(
    ("token", "connector"),
    [
        (TOKEN, (b"join", WHO, b"guessed", b"a")),
        (TOKEN, (b"join", WHO, b"", b"a")),
        (TOKEN, (b"mesh", WHO, TOKEN, b"a")),
        (TOKEN, (b"join", WHO, TOKEN, b"b")),
        (TOKEN, (b"joi", WHO, TOKEN, b"na")),
        (None, (b"join", WHO, TOKEN, b"a")),
        (b"", (b"join", WHO, b"", b"a")),
    ],
)
def test_what_does_not_fit_is_refused(token: bytes | None, connector: tuple[bytes, bytes, bytes, bytes]) -> None:
    with pytest.raises(RefusedError):
        meet(Acceptance(b"join", 4, b"a"), token, connector)


def answer_of(greeting: bytes, token: bytes) -> tuple[bytes, socket.socket, socket.socket]:
    """The connector's answer to a greeting, and the sockets of both sides. The connector then waits for the verdict."""
    ours, theirs = socket.socketpair()
    ours.sendall(greeting)
    theirs.settimeout(0.05)
    with pytest.raises(TimeoutError):
        introduce(theirs, b"join", WHO, token)
    return ours.recv(1000), ours, theirs


def test_an_answer_is_worth_nothing_in_another_connection() -> None:
    first, second = Acceptance(b"join", 4), Acceptance(b"join", 4)
    answer, *sockets = answer_of(first.greeting, TOKEN)
    assert TOKEN not in answer and len(answer) == 4 + NONCE_BYTES + PROOF_BYTES
    second.add(answer)
    assert second.judge(lambda who: TOKEN) == (None, REFUSED)
    first.add(answer)
    assert first.judge(lambda who: TOKEN)[0] == WHO
    for each in sockets:
        each.close()


def test_a_proof_of_one_side_is_none_of_the_other() -> None:
    """An impostor sends the connector its own proof back."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        introducing = pool.submit(introduce, theirs, b"join", WHO, TOKEN)
        ours.sendall(MAGIC + bytes(NONCE_BYTES))
        ours.sendall(ours.recv(1000)[-PROOF_BYTES:])
        with pytest.raises(ImpostorError, match="does not know the token"):
            introducing.result(300)


@pytest.mark.parametrize("sent", [b"", b"220 smtp ready", MAGIC, b"HTTP/1.1 400 Bad Request" + b"." * GREETING_BYTES])
def test_other_programs_are_told_apart(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(sent)
        ours.close()
        with pytest.raises(ConnectionError):
            introduce(theirs, b"join", WHO, TOKEN)


def test_both_sides_see_the_same_address() -> None:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        server = socket.create_server((host, 0), family=family)
        with server, socket.create_connection(server.getsockname()[:2]) as connected:
            accepted, _ = server.accept()
            with accepted:
                assert address_bytes(connected.getpeername()) == address_bytes(accepted.getsockname())
