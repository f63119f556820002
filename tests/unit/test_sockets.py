"""Which addresses can be reached."""

from __future__ import annotations

import gc
import secrets
import socket
import time
import uuid
from contextlib import ExitStack

import pytest

from inflight.errors import EngineError
from inflight.interface.start_up import Hello
from inflight.processes.acceptor import connect
from inflight.sockets import connect_locally, listen, listen_locally, shown, socket_pair, unreachable


def test_an_ipv6_address_is_shown_with_brackets() -> None:
    assert (shown("::1", 80), shown("10.0.0.1", 80), shown("head", 80)) == ("[::1]:80", "10.0.0.1:80", "head:80")
    hello = Hello(schema="", rank=1, world_size=2, nnodes=2)
    with pytest.raises(EngineError, match=r"node 0 .*\[::1\]:9 within 0 s"):
        connect(("::1", 9), hello, "token", max_seconds=0.0)


def test_a_local_name_is_free_again_when_its_listener_is_closed() -> None:
    name = f"inflight-test-{uuid.uuid4().hex}"
    with pytest.raises(ConnectionRefusedError):
        connect_locally(name)
    for _ in range(2):
        with listen_locally(name) as listener, connect_locally(name) as client:
            with listener.accept()[0] as accepted:
                accepted.sendall(b"x")
            assert (client.recv(1), client.recv(1)) == (b"x", b"")


def test_of_a_pair_of_sockets_only_ours_stays_open_and_none_if_the_block_fails() -> None:
    with socket_pair() as (ours, theirs):
        theirs.sendall(b"x")
    assert (ours.recv(1), ours.recv(1), theirs.fileno()) == (b"x", b"", -1)
    ours.close()
    with pytest.raises(KeyboardInterrupt), socket_pair() as (ours, theirs):
        raise KeyboardInterrupt
    assert (ours.fileno(), theirs.fileno()) == (-1, -1)


def test_an_address_is_unreachable_if_nobody_listens_there_or_no_route_leads_there() -> None:
    with listen("127.0.0.1", 0) as listener, socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        addresses = {3: listener.getsockname(), 4: deaf.getsockname(), 5: ("255.255.255.255", 9)}
        assert unreachable(addresses, 5.0, lambda: False) == (4, 5)


def test_an_address_that_does_not_answer_is_unreachable_after_the_time_or_when_the_wait_is_in_vain() -> None:
    with socket.socket() as full, ExitStack() as clients:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(2):  # more connections than the listener keeps: the kernel drops the packets of the next ones
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        for seconds, is_in_vain in ((0.2, False), (600.0, True)):
            start = time.monotonic()
            assert unreachable({7: full.getsockname()}, seconds, lambda: is_in_vain) == (7,)  # noqa: B023
            assert time.monotonic() - start < 300


def test_a_local_name_that_is_taken_leaves_no_socket_open() -> None:
    """The suite makes an error of a socket that is collected without having been closed."""
    name = secrets.token_hex(8)
    with listen_locally(name):
        with pytest.raises(OSError, match="in use"):
            listen_locally(name)
        connect_locally(name).close()
    gc.collect()
    with pytest.raises(OSError, match="refused"):
        connect_locally(name)
