"""`supervise` over front ends and engines that are played: orders, reports, and how all of them end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.entrypoints.serve import supervisor
from inflight.entrypoints.serve.front_end_main import CUT, DRAIN, OPEN, FrontEndStart
from inflight.entrypoints.serve.listener import Listener
from inflight.entrypoints.serve.server import StartUpClock
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.shutdown import CUT_SECONDS, END_SECONDS, Shutdown
from inflight.entrypoints.serve.supervisor import CUT_GRACE_SECONDS, LAST_SECONDS, Supervisor, supervise
from inflight.entrypoints.serve.terminal import ServerTerminal
from inflight.errors import ConfigError, EngineDeadError, EngineError
from inflight.processes.line_wire import LineWire
from tests.support.kept_handler import kept_handler
from tests.support.virtual_time import VirtualTimeLoop
from tests.unit.engine.serving.event_loop import run, until

SETTINGS = ServerSettings(port=0, api_server_count=2, shutdown_timeout=20.0)
ARGS = EngineArgs(model="m")


class PlayedProcess:
    """In place of the process of a front end: the test has the other end of its socket."""

    made: list[PlayedProcess]

    def __init__(self, title: str, module: str, fds: Sequence[int], *, variables: dict[str, str]) -> None:
        self.title, self.module, self.variables = title, module, variables
        self.listener = os.fstat(fds[0]).st_ino
        self.control = socket.socket(fileno=os.dup(fds[1]))
        self.control.setblocking(False)
        self.start = FrontEndStart.from_file(os.dup(fds[2]))
        self.state = "killed"
        self.signals: list[int] = []
        self.orders: list[object] = []
        self.wire = LineWire(self.control)
        self.given: list[int] = []
        self.is_closed = False
        self.made.append(self)

    def heard(self) -> list[object]:
        """All orders so far."""
        with contextlib.suppress(BlockingIOError, EOFError):
            while True:
                for order, fd in self.wire.receive():
                    self.orders.append(order)
                    self.given += [] if fd is None else [fd]
        return self.orders

    def report(self, report: object) -> None:
        self.control.sendall(json.dumps(report).encode() + b"\n")

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def kill_if_stopped(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True
        self.control.close()


class PlayedKeeper:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.seats: list[Any] = []
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(self, seat: Any) -> int:
        self.calls.append("add")
        self.seats.append(seat)
        return len(self.seats) - 1

    def remove(self, number: int) -> None:
        self.calls.append(f"remove {number}")

    def start(self) -> None:
        self.calls.append("start")

    async def failed(self) -> None:
        await self.end

    async def close(self, *grace: float) -> None:
        self.calls.append("close")


class Scene:
    def __init__(self, num_keepers: int = 1, **limits: Any) -> None:
        self.shutdowns: list[Shutdown] = []
        self.times: list[tuple[float, ...]] = []  # of these shutdowns
        self.keepers = [PlayedKeeper() for _ in range(num_keepers)]
        self.config = SimpleNamespace(fault_tolerance=FaultToleranceConfig(**limits))
        self.listener = Listener(SETTINGS)
        self.clock = StartUpClock()
        self.task = asyncio.create_task(supervise(SETTINGS, ARGS, self.listener, self.clock))

    def find(self, name: str) -> Any:
        return SimpleNamespace(make_keepers=self.make_keepers, resolve_config=self.resolve_config)

    def resolve_config(self, args: EngineArgs) -> Any:
        assert args is ARGS
        return self.config

    async def make_keepers(self, args: EngineArgs, config: Any) -> Any:
        assert args is ARGS and config is self.config
        return self.keepers


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[float]]:
    """How many seconds processes had to end."""
    stops: list[float] = []
    PlayedProcess.made = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(supervisor, "ChildProcess", PlayedProcess)
    monkeypatch.setattr(supervisor, "stop_processes", lambda processes, seconds: stops.append(seconds))
    yield stops
    for process in PlayedProcess.made:
        process.close()


def play(
    monkeypatch: pytest.MonkeyPatch, test: Callable[[Scene, list[PlayedProcess]], Awaitable[None]], **options: Any
) -> None:
    """`test` gets the scene and its two front ends, which run."""

    async def begin() -> None:
        scene = Scene(**options)

        class Watched(Shutdown):
            def __init__(self, *given: float) -> None:
                super().__init__(*given)
                scene.shutdowns.append(self)
                scene.times.append(given)

        monkeypatch.setattr(supervisor, "Shutdown", Watched)
        monkeypatch.setattr(supervisor, "importlib", SimpleNamespace(import_module=scene.find))
        await until(lambda: len(PlayedProcess.made) == 2)
        await test(scene, PlayedProcess.made)
        scene.listener.close()

    run(begin)


async def opened(front_ends: Sequence[PlayedProcess]) -> None:
    for each in front_ends:
        each.report({"ready": "the model"})
    await until(lambda: all(each.heard() == [OPEN] for each in front_ends))


async def ended(scene: Scene, front_ends: Sequence[PlayedProcess]) -> int:
    """All front ends drain. The exit code."""
    for each in front_ends:
        await until(lambda each=each: DRAIN in each.heard())  # type: ignore[misc]
        each.control.close()
    return await asyncio.wait_for(scene.task, 300)


def test_front_ends_answer_when_all_are_ready_and_drain_at_the_end(
    monkeypatch: pytest.MonkeyPatch, stops: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    async def test(scene: Scene, front_ends: list[PlayedProcess]) -> None:
        assert scene.times == [(SETTINGS.shutdown_timeout, 2 * END_SECONDS)]
        assert signal.getsignal(signal.SIGHUP) == hangup, "no file is read again"
        inode = os.fstat(scene.listener.socket.fileno()).st_ino
        for index, each in enumerate(front_ends):
            assert each.title == f"inflight: front end {index}"
            assert each.module == "inflight.entrypoints.serve.front_end_main"
            assert each.listener == inode
            assert each.start == FrontEndStart(settings=SETTINGS, args=ARGS, index=index, is_replacement=False)
            assert Path(each.variables["PROMETHEUS_MULTIPROC_DIR"]).is_dir()
        (keeper,) = scene.keepers
        await until(lambda: "start" in keeper.calls)
        assert keeper.calls == ["add", "add", "start"]
        front_ends[1].report({"ready": "the model"})
        await asyncio.sleep(0.01)
        assert front_ends[0].heard() == front_ends[1].heard() == []
        front_ends[0].report({"ready": "the model"})
        for each in front_ends:
            await until(lambda each=each: each.heard() == [OPEN])  # type: ignore[misc]
        assert "serves the model, 2 front ends, after" in caplog.text
        phases = [phase.split()[0] for phase in scene.clock.summary().split(": ")[1].split(", ")]
        assert phases == ["importing", "engine"]
        scene.shutdowns[0].exit_code = 5
        scene.shutdowns[0].begun.set()
        assert await ended(scene, front_ends) == 5
        assert scene.listener.socket.fileno() == -1 and all(each.is_closed for each in front_ends)
        assert keeper.calls[-1] == "close"
        assert not Path(front_ends[0].variables["PROMETHEUS_MULTIPROC_DIR"]).exists()
        assert stops == [LAST_SECONDS, 0.0, 0.0]

    hangup = signal.getsignal(signal.SIGHUP)
    caplog.set_level("INFO", "inflight")
    play(monkeypatch, test)


@pytest.mark.parametrize(
    ("report", "kind", "message"),
    [
        (["ConfigError", "a wrong file"], ConfigError, "^a wrong file$"),
        (["OSError", "no memory"], EngineError, "a front end could not start: OSError: no memory"),
    ],
)
def test_the_reason_why_a_front_end_could_not_start_is_reported(
    monkeypatch: pytest.MonkeyPatch, stops: list[float], report: list[str], kind: type[Exception], message: str
) -> None:
    async def test(scene: Scene, front_ends: list[PlayedProcess]) -> None:
        text = json.dumps({"failed": report}).encode() + b"\n"
        for cut in (text[:9], text[9:]):
            front_ends[1].control.sendall(cut)
            await asyncio.sleep(0.001)
        front_ends[1].control.close()
        with pytest.raises(kind, match=message):
            await ended(scene, front_ends[:1])
        assert len(front_ends) == 2

    play(monkeypatch, test)


def test_a_dead_front_end_is_replaced_and_the_new_one_answers_when_it_is_ready(
    monkeypatch: pytest.MonkeyPatch, stops: list[float]
) -> None:
    async def test(scene: Scene, front_ends: list[PlayedProcess]) -> None:
        await opened(front_ends)
        front_ends[0].control.close()
        await until(lambda: len(front_ends) == 3)
        new = front_ends[2]
        assert new.start == FrontEndStart(settings=SETTINGS, args=ARGS, index=0, is_replacement=True)
        await until(lambda: scene.keepers[0].calls[-2:] == ["remove 0", "add"])
        assert new.heard() == []
        new.report({"ready": "the model"})
        await until(lambda: new.heard() == [OPEN])
        scene.shutdowns[0].begun.set()
        assert await ended(scene, front_ends[1:]) == 0

    play(monkeypatch, test)


def test_a_front_end_that_dies_during_the_start_is_replaced(
    monkeypatch: pytest.MonkeyPatch, stops: list[float]
) -> None:
    """The new one waits for the others, too."""

    async def test(scene: Scene, front_ends: list[PlayedProcess]) -> None:
        await until(lambda: "start" in scene.keepers[0].calls)
        front_ends[0].control.close()
        await until(lambda: len(front_ends) == 3)
        front_ends[2].report({"ready": "the model"})
        await asyncio.sleep(0.02)
        assert front_ends[2].heard() == []
        front_ends[1].report({"ready": "the model"})
        await until(lambda: all(each.heard() == [OPEN] for each in front_ends[1:]))
        scene.shutdowns[0].begun.set()
        assert await ended(scene, front_ends[1:]) == 0

    play(monkeypatch, test)


def test_no_front_end_is_replaced_if_faults_are_not_tolerated(
    monkeypatch: pytest.MonkeyPatch, stops: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    async def test(scene: Scene, front_ends: list[PlayedProcess]) -> None:
        front_ends[0].control.close()
        with pytest.raises(EngineError, match=r"a front end has died \(killed\)"):
            await ended(scene, front_ends[1:])
        assert len(front_ends) == 2
        assert stops == [LAST_SECONDS, LAST_SECONDS, 0.0, 0.0]
        assert "Exception in callback" not in caplog.text, "its end is noticed once"

    play(monkeypatch, test, enabled=False)


def test_a_front_end_that_died_just_before_the_shutdown_makes_it_no_failure(
    monkeypatch: pytest.MonkeyPatch, stops: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    class NoProcess:
        def __init__(self, *_: object, **__: object) -> None:
            raise OSError("no memory at this moment")

    async def test(scene: Scene, front_ends: list[PlayedProcess]) -> None:
        await opened(front_ends)
        monkeypatch.setattr(supervisor, "ChildProcess", NoProcess)
        front_ends[0].control.close()
        await until(lambda: "front end 0 cannot be started" in caplog.text)
        scene.shutdowns[0].begun.set()
        assert await ended(scene, front_ends[1:]) == 0
        assert "a front end has died (killed)" in caplog.text

    play(monkeypatch, test)


def test_the_server_ends_when_the_last_engine_is_given_up(monkeypatch: pytest.MonkeyPatch, stops: list[float]) -> None:
    async def test(scene: Scene, front_ends: list[PlayedProcess]) -> None:
        await opened(front_ends)
        scene.keepers[1].end.set_exception(EngineDeadError("the first"))
        await asyncio.sleep(0.01)
        assert not scene.task.done() and front_ends[0].heard() == [OPEN]
        scene.keepers[0].end.set_exception(EngineDeadError("the second"))
        with pytest.raises(EngineDeadError, match="the first"):
            await ended(scene, front_ends)
        assert [each.calls[-1] for each in scene.keepers] == ["close", "close"]

    play(monkeypatch, test, num_keepers=2)


def test_a_front_end_gets_the_sockets_of_each_replica(monkeypatch: pytest.MonkeyPatch, stops: list[float]) -> None:
    async def test(scene: Scene, front_ends: list[PlayedProcess]) -> None:
        await until(lambda: "start" in scene.keepers[1].calls)
        ours, theirs = socket.socketpair()
        seat = scene.keepers[1].seats[0]
        assert seat.put(ours) and ours.fileno() == -1
        seat.fail(EngineDeadError("given up"))
        assert front_ends[0].heard() == [{"engine": 1}, {"gone": 1}] and front_ends[1].heard() == []
        with socket.socket(fileno=front_ends[0].given[0]) as given, theirs:
            theirs.send(b"x")
            assert given.recv(1) == b"x"
        scene.shutdowns[0].begun.set()
        await until(lambda: DRAIN in front_ends[0].heard())
        front_ends[0].control.close()
        late, other = socket.socketpair()
        with other:
            assert not seat.put(late) and late.fileno() == -1
        await ended(scene, front_ends[1:])

    play(monkeypatch, test, num_keepers=2)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_front_end_that_does_not_drain_is_cut(stops: list[float], is_cut: bool) -> None:
    """After the time for its requests, or at once after a second signal."""

    async def test() -> None:
        shutdown = Shutdown(1.0)
        supervised = Supervisor(SETTINGS, ARGS, Listener(SETTINGS), shutdown, "")
        supervised.start_front_ends()
        loop = asyncio.get_running_loop()
        sockets = [front_end._socket.fileno() for front_end in supervised.front_ends]
        start = loop.time()
        if is_cut:
            shutdown.cut.set()
        await supervised.end()
        waited = loop.time() - start
        assert not any(loop.remove_reader(descriptor) for descriptor in sockets)
        after_cut = CUT_SECONDS + CUT_GRACE_SECONDS
        assert waited == pytest.approx(after_cut if is_cut else SETTINGS.shutdown_timeout + 2 * after_cut, abs=0.1)
        assert stops == [LAST_SECONDS, 0.0, 0.0]
        assert [each.is_closed for each in PlayedProcess.made] == [True, True]
        assert [front_end.failure for front_end in supervised.front_ends] == [None, None]

    heard: list[list[int]] = []
    closing = PlayedProcess.close

    def close(process: PlayedProcess) -> None:
        if process.control.fileno() != -1:
            heard.append(process.heard())
        closing(process)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner, pytest.MonkeyPatch.context() as patched:
        patched.setattr(PlayedProcess, "close", close)
        runner.run(test())
    assert heard == [[DRAIN, CUT]] * 2


def test_front_ends_read_files_again_with_the_command(
    monkeypatch: pytest.MonkeyPatch, stops: list[float], tmp_path: Path
) -> None:
    async def test() -> None:
        settings = ServerSettings(port=0, api_server_count=2, api_key_file=str(tmp_path / "keys"))
        terminal = ServerTerminal()
        supervised = Supervisor(settings, ARGS, Listener(SETTINGS), Shutdown(1.0), "", terminal)
        supervised.start_front_ends()
        assert signal.getsignal(signal.SIGHUP) != signal.SIG_DFL, "the signal would end the tests"
        signal.raise_signal(signal.SIGHUP)
        await until(lambda: all(each.signals == [signal.SIGHUP] for each in PlayedProcess.made))
        assert not supervised._shutdown.begun.is_set()
        monkeypatch.setattr(ServerTerminal, "was_closed", True)
        signal.raise_signal(signal.SIGHUP)
        await until(supervised._shutdown.begun.is_set)
        for each in PlayedProcess.made:
            each.control.close()
        await supervised.end()

    monkeypatch.setattr(ServerTerminal, "was_closed", False)
    with kept_handler(signal.SIGHUP):
        run(test)
