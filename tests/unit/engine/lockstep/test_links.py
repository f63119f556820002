"""The links between the engine cores of a machine: news in order, and a new core in the place of one that has ended."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest

from inflight.engine.lockstep.links import CAME, LOST, LockstepLinks
from inflight.processes.line_wire import LineWire
from inflight.sockets import connect_locally
from tests.support.waits import wait_until


class Core:
    def __init__(self, replica: int, size: int, secret: str) -> None:
        self.woken = threading.Event()
        self.links = LockstepLinks(replica, size, secret, self.woken.set)
        self.news: list[tuple[int, Any]] = []

    def has(self, *news: tuple[int, Any]) -> bool:
        self.news += self.links.take_news()
        return self.news[-len(news) :] == list(news)

    def close(self) -> None:
        self.links.close()


@contextmanager
def cores(size: int) -> Iterator[list[Core]]:
    secret = secrets.token_hex(8)
    with ExitStack() as opened:
        found = [opened.enter_context(closing(Core(index, size, secret))) for index in reversed(range(size))]
        found.reverse()
        wait_until(lambda: all(core.has() is not None and len(core.news) == size - 1 for core in found))
        yield found


def test_messages_come_in_order_and_wake_the_core() -> None:
    with cores(3) as (first, second, third):
        assert sorted(first.news) == [(1, CAME), (2, CAME)] and sorted(third.news) == [(0, CAME), (1, CAME)]
        second.woken.clear()
        for number in range(50):
            first.links.send(1, {"step": [1, number]})
        wait_until(lambda: second.has(*[(0, {"step": [1, number]}) for number in range(50)]))
        assert second.woken.is_set() and not third.links.take_news()
        third.links.send(0, "x")
        first.links.wait(60.0)
        wait_until(lambda: first.has((2, "x")))


@pytest.mark.parametrize("ending", [0, 1])
def test_another_core_takes_the_place_of_one_that_has_ended(ending: int) -> None:
    with cores(2) as both:
        left = both[1 - ending]
        both[ending].close()
        wait_until(lambda: left.has((ending, LOST)))
        left.links.send(ending, "nobody hears this")
        with closing(Core(ending, 2, both[0].links._secret)) as again:
            wait_until(lambda: left.has((ending, CAME)) and again.has((1 - ending, CAME)))
            left.links.send(ending, "hello")
            wait_until(lambda: again.has((1 - ending, "hello")))


def test_who_does_not_know_the_secret_is_refused() -> None:
    with cores(2) as (first, second):
        name = first.links._name(0)
        assert first.links._secret not in name
        for hello in ({"replica": 1, "secret": "guessed"}, {"replica": 7, "secret": first.links._secret}, [], "x"):
            with connect_locally(name) as stranger:
                LineWire(stranger).send(hello)
                assert stranger.recv(1) == b""
        with connect_locally(name) as stranger:
            stranger.sendall(b"no json\n")
            assert stranger.recv(1) == b""
        assert first.has((1, CAME)), "the link of the other core stands"
        second.links.send(0, "still here")
        wait_until(lambda: first.has((1, "still here")))


def test_a_newer_link_takes_the_place_of_an_older_one() -> None:
    with cores(2) as (first, second):
        second.close()
        wait_until(lambda: first.has((1, LOST)))
        with link_to(first), link_to(first):
            wait_until(lambda: first.has((1, CAME), (1, LOST), (1, CAME)))


def test_a_core_that_reads_nothing_is_lost() -> None:
    with cores(2) as (first, second):
        second.close()
        wait_until(lambda: first.has((1, LOST)))
        with link_to(first):
            wait_until(lambda: first.has((1, CAME)))
            connection = first.links._wires[1][0]
            soon = bytes(8) + (1000).to_bytes(8, "little")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, soon)
            while not first.has((1, LOST)):
                first.links.send(1, "x" * 65536)


def link_to(core: Core) -> socket.socket:
    """What a core of replica 1 would open."""
    connected = connect_locally(core.links._name(0))
    LineWire(connected).send({"replica": 1, "secret": core.links._secret})
    return connected


def test_close_ends_all_threads() -> None:
    with cores(2):
        pass
    wait_until(lambda: not any(thread.name.startswith("inflight-lockstep") for thread in threading.enumerate()))
