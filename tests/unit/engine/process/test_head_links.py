"""`HeadLinks`: a spare connection is always there, also after a link was lost, and the process does not outlive its head."""

from __future__ import annotations

import asyncio
import queue
import socket
from typing import Any

import pytest

from benchmarks.shared.free_port import free_port
from inflight.engine.process import head_links
from inflight.engine.process.control_socket import FrontEndLink
from inflight.engine.process.engine_process import EXIT_HEAD_LOST
from inflight.engine.process.head_links import HeadLinks, join_head
from inflight.engine.process.outbox import EXIT_FAILED
from inflight.errors import ConfigError, EngineError
from tests.unit.engine.process.head_cases import TERMS, TOKEN, config_of_replica, head_of
from tests.unit.engine.process.played_processes import PlayedFrontEnd
from tests.unit.engine.serving.event_loop import run, until


@pytest.fixture(autouse=True)
def exits(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[int]:
    """The exit codes with which the process would have ended."""
    codes: queue.Queue[int] = queue.Queue()

    def leave(code: int) -> None:
        codes.put(code)  # then the thread ends

    monkeypatch.setenv("INFLIGHT_CLUSTER_TOKEN", TOKEN)
    monkeypatch.setattr(head_links, "exit_now", leave)
    return codes


def test_a_thread_that_cannot_go_on_ends_the_process(
    exits: queue.Queue[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def join(*_: object) -> socket.socket:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(head_links, "join_head", join)
    HeadLinks(config_of_replica(1), lambda _link, _deaths: None)
    assert exits.get(timeout=300) == EXIT_FAILED
    assert "can't start new thread" in caplog.text


def test_a_lost_link_is_made_again_and_the_process_ends_with_its_head(exits: queue.Queue[int]) -> None:
    links: queue.Queue[FrontEndLink] = queue.Queue()

    async def test() -> None:
        port = free_port()
        _, replica = head_of(port)
        front_ends: list[Any] = [PlayedFrontEnd(), PlayedFrontEnd()]
        for each in front_ends:
            replica.add(each)
        replica.start()
        config = config_of_replica(port, seconds=300.0)
        HeadLinks(config, lambda link, num_deaths: links.put(link))
        first, second = [await asyncio.to_thread(links.get, timeout=300) for _ in front_ends]
        assert (first.index, second.index) == (0, 1)
        await until(lambda: replica.spare is not None)
        second.on_end()  # as the thread does that reads from it
        again = await asyncio.to_thread(links.get, timeout=300)
        assert again.index == 1 and len(front_ends[1].sockets) == 2
        await until(lambda: replica.spare is not None)
        object.__setattr__(config.fault_tolerance, "engine_recovery_timeout_sec", 0.5)
        await replica.close()
        assert await asyncio.to_thread(exits.get, timeout=300) == EXIT_HEAD_LOST
        for link in (first, second, again):
            link.outbox.close(1.0)
            link.stream.close()
        for front_end in front_ends:
            for given in front_end.sockets:
                given.close()

    run(test)


def test_a_link_that_ends_while_the_spare_connection_is_made(
    exits: queue.Queue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head was told of the link, so it would not give the front end this connection."""
    joined: list[frozenset[int]] = []
    ends: list[socket.socket] = []
    links: list[HeadLinks] = []

    def join(_parallel: object, linked: frozenset[int], _seconds: float) -> socket.socket:
        ours, theirs = socket.socketpair()
        ends.append(theirs)
        joined.append(linked)
        if len(joined) == 1:
            theirs.sendall((7).to_bytes(4))
        elif len(joined) == 2:
            taken[0].on_end()  # now
        else:
            ours.close()
            raise EngineError("the head is lost")
        return ours

    taken: list[FrontEndLink] = []
    monkeypatch.setattr(head_links, "join_head", join)
    links.append(HeadLinks(config_of_replica(1), lambda link, _: taken.append(link)))
    assert exits.get(timeout=300) == EXIT_HEAD_LOST  # before the test ends, as then `os._exit` is the real one again
    assert joined == [frozenset(), frozenset({7}), frozenset()]
    assert ends[1].recv(4) == b""  # it was closed at once
    taken[0].outbox.close(1.0)
    taken[0].stream.close()
    for end in ends:
        end.close()


def test_a_refusal_is_final_only_in_a_trial(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        port = free_port()
        _, replica = head_of(port)
        replica.start()
        spare = await asyncio.to_thread(join_head, config_of_replica(port).parallel, frozenset(), 60.0)
        later = asyncio.create_task(asyncio.to_thread(join_head, config_of_replica(port).parallel, frozenset(), 60.0))
        await until(
            lambda: "the next try is in" in caplog.text
        )  # the head has not noticed yet that the old link is lost
        spare.close()
        (await later).close()
        wrong = config_of_replica(port, terms={**TERMS, "dtype": "bfloat16"}).parallel
        with pytest.raises(ConfigError, match="dtype is bfloat16 at the replica"):
            await asyncio.to_thread(join_head, wrong, frozenset(), 60.0, is_trial=True)
        await replica.close()
        with pytest.raises(EngineError, match=rf"127.0.0.1:{port} within "):
            await asyncio.to_thread(join_head, wrong, frozenset(), 0.1)

    run(test)
