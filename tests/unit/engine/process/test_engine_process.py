"""`EngineProcess` over a child that is played: how it begins, what it tells the core, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.engine.process import engine_process
from inflight.engine.process.control_socket import Begin, ControlSocket
from inflight.engine.process.engine_process import MAX_END_SECONDS, EngineProcess, title_of
from inflight.errors import EngineDeadError
from inflight.interface.serving import StartEngine
from inflight.interface.statistics import FaultStatus
from tests.conformance.configs import engine_config
from tests.unit.engine.serving.event_loop import run, until


class PlayedChild:
    """In place of a `ChildProcess`. The test has the other end of its control socket."""

    made: list[PlayedChild]
    is_born_dead = False

    def __init__(self, title: str, module: str, fds: Sequence[int], *, keeps_secrets: bool = False) -> None:
        self.title, self.module, self.keeps_secrets = title, module, keeps_secrets
        self.control = socket.socket(fileno=os.dup(fds[0]))
        self.pidfd, self._life = os.pipe()
        self.exit_code: int | None = None
        self.signals: list[int] = []
        self.is_closed = False
        self.made.append(self)
        if self.is_born_dead:
            self.control.close()

    @property
    def state(self) -> str:
        return f"exit code {self.exit_code}"

    def fileno(self) -> int:
        return self.pidfd

    def end(self, code: int) -> None:
        self.exit_code = code
        os.close(self._life)  # so `pidfd` is readable

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def close(self) -> None:
        self.is_closed = True
        os.close(self.pidfd)
        if self.exit_code is None:
            os.close(self._life)
        self.control.close()


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Any], float]]:
    """The processes that were stopped, with the seconds that they had."""
    stops: list[tuple[list[Any], float]] = []
    PlayedChild.made = []
    monkeypatch.setattr(engine_process, "ChildProcess", PlayedChild)
    monkeypatch.setattr(engine_process, "stop_processes", lambda *given: stops.append(given))
    return stops


def start(*, is_spare: bool = False, **changes: Any) -> tuple[EngineProcess, PlayedChild]:
    config = replace(engine_config(), **changes)
    process = EngineProcess(EngineArgs(tokenizer="t", skip_tokenizer_init=True), config, is_spare=is_spare)
    return process, PlayedChild.made[-1]


@pytest.mark.parametrize(("is_spare", "title"), [(False, "inflight: engine"), (True, "inflight: spare engine")])
def test_the_core_learns_its_configuration_first(stops: list[Any], is_spare: bool, title: str) -> None:
    async def test() -> None:
        process, child = start(is_spare=is_spare)
        assert (child.title, child.module) == (title, "inflight.engine.process.core_process")
        assert child.keeps_secrets
        process.begin((), fault_time=2.5)
        control = ControlSocket(child.control)
        assert control.receive_start() == StartEngine(
            config=engine_config(), tokenizer="t", skip_tokenizer_init=True, is_spare=is_spare
        )
        assert control.receive() == Begin(FaultStatus(), 2.5, frozenset(), ())
        await process.close(3.0)
        assert control.receive() is None
        assert stops == [([child], 3.0)]

    run(test)


def test_a_core_whose_owner_is_gone_does_not_start() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        assert ControlSocket(theirs).receive_start() is None


def test_one_of_several_replicas_has_its_number_in_its_title() -> None:
    config = engine_config()
    several = replace(config, parallel=replace(config.parallel, replicas=(3, 4), replica_index=1))
    assert [title_of(config), title_of(several), title_of(several, "t")] == [
        "inflight: engine",
        "inflight: engine 4",
        "t 4",
    ]


def test_a_process_that_ends_at_once_is_told(stops: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(PlayedChild, "is_born_dead", True)
        with pytest.raises(EngineDeadError, match="exit code None"):
            start()
        assert stops == [([PlayedChild.made[0]], MAX_END_SECONDS)]
        assert PlayedChild.made[0].is_closed

    run(test)


def test_a_process_that_is_gone_before_it_begins_is_told(stops: list[Any]) -> None:
    async def test() -> None:
        process, child = start()
        child.control.close()
        with pytest.raises(EngineDeadError, match="is gone"):
            process.begin((0, 1))
        assert stops == [([child], MAX_END_SECONDS)]
        loop = asyncio.get_running_loop()
        assert not loop.remove_reader(child.pidfd), "nobody listens any more"
        assert all(each.fileno() == -1 for each in process.sockets.values())
        assert child.is_closed

    run(test)


def test_a_new_process_has_one_front_end_and_has_said_nothing(stops: list[Any]) -> None:
    async def test() -> None:
        process = EngineProcess(EngineArgs(), engine_config())
        assert PlayedChild.made[-1].title == "inflight: engine"
        assert (process.is_ready, process.has_ended, process.was_killed) == (False, False, False)
        assert (process.num_blocks, process.recovery_times, process.faults, process.lone_request) == (0, (), None, "")
        process.begin()
        assert process.sockets.keys() == {0}
        await process.close()

    run(test)


@pytest.mark.parametrize("is_ready", [False, True])
def test_what_the_core_says_and_its_end_are_noticed(stops: list[Any], is_ready: bool) -> None:
    async def test() -> None:
        process, child = start()
        descriptors = [process.process.fileno(), process._control.fileno()]
        control = ControlSocket(child.control)
        if is_ready:
            control.send({"lone_request": "a"})
            await until(lambda: process.lone_request == "a")
            control.send({"ready": 4096})
        else:
            control.send({"failed": "no memory"})
        child.end(0)
        await until(lambda: process.has_ended)
        assert (process.is_ready, process.num_blocks) == (is_ready, 4096 * is_ready)
        assert process.failure == ("" if is_ready else "no memory")
        assert process.state.endswith("no memory") is not is_ready
        await process.close()
        assert stops == [([child], MAX_END_SECONDS)]
        loop = asyncio.get_running_loop()
        assert not any(loop.remove_reader(descriptor) for descriptor in descriptors)

    run(test)


def test_nobody_listens_to_a_process_that_was_closed(stops: list[Any]) -> None:
    async def test() -> None:
        process, child = start()
        descriptors = [child.fileno(), process._control.fileno()]
        await process.close()
        loop = asyncio.get_running_loop()
        assert not any(loop.remove_reader(descriptor) for descriptor in descriptors)

    run(test)


def test_a_process_that_something_else_has_killed_was_lost(stops: list[Any]) -> None:
    async def test() -> None:
        for code, is_killed, was_lost in (
            (None, False, False),
            (0, False, False),
            (1, False, False),
            (-9, False, True),
            (-9, True, False),
        ):
            process, child = start()
            if is_killed:
                process.kill("it hangs")
            if code is not None:
                child.end(code)
            assert (process.was_lost, process.was_killed) == (was_lost, is_killed)
            assert child.signals == [signal.SIGKILL] * is_killed
            await process.close(0.0)

    run(test)


def test_sockets_that_nobody_took_are_closed_with_the_process(stops: list[Any]) -> None:
    async def test() -> None:
        process, _ = start()
        process.begin((0, 1))
        taken = process.sockets.pop(0)
        left = process.sockets[1]
        await process.close()
        assert taken.fileno() != -1 and left.fileno() == -1
        taken.close()
        assert process.connect(2, 0) is None

    run(test)
