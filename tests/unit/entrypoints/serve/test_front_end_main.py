"""The front end's end of the socket to the command."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.serve import front_end_main
from inflight.entrypoints.serve.front_end_main import (
    CUT,
    DRAIN,
    EXIT_COMMAND_GONE,
    EXIT_FAILED,
    OPEN,
    Control,
    FrontEndStart,
    main,
)
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.shutdown import Shutdown
from inflight.errors import ConfigError, EngineDeadError
from inflight.processes.line_wire import LineWire
from tests.unit.engine.serving.event_loop import run


def test_a_replica_that_is_gone_may_come_back() -> None:
    """The order says that it was given up. If it is on another machine, it may only be away, and a socket to it follows."""

    async def test() -> None:
        ours, theirs = socket.socketpair()
        control = Control(theirs, Shutdown(1.0), 2)
        sent, other = socket.socketpair()
        with ours, theirs, sent, other:
            LineWire(ours).send({"gone": 1})
            with pytest.raises(EngineDeadError) as caught:
                await asyncio.wait_for(control.engine_sockets[1].get(), 300)
            assert str(caught.value) == "the engine was given up, or its machine is away"
            LineWire(ours).send({"engine": 1}, [sent.fileno()])
            with await asyncio.wait_for(control.engine_sockets[1].get(), 300) as given:
                given.send(b"to the engine")
                assert other.recv(100) == b"to the engine"
            control.close()

    run(test)


def test_orders_that_are_read_together_go_to_their_replicas() -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        control = Control(theirs, Shutdown(1.0), 3)
        sent, other = socket.socketpair()
        with ours, theirs, sent, other:
            LineWire(ours).send({"gone": 0})
            LineWire(ours).send({"gone": 2})
            LineWire(ours).send({"engine": 1}, [sent.fileno()])
            for index in (0, 2):
                with pytest.raises(EngineDeadError):
                    await asyncio.wait_for(control.engine_sockets[index].get(), 300)
            with await asyncio.wait_for(control.engine_sockets[1].get(), 300) as given:
                given.send(b"x")
                assert other.recv(100) == b"x"
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


@pytest.mark.parametrize(
    ("orders", "opened", "begun", "codes"),
    [
        ([OPEN], True, 0, []),
        ([DRAIN], False, 1, []),
        ([OPEN, DRAIN], True, 1, []),
        ([CUT], False, 0, [EXIT_COMMAND_GONE]),
    ],
)
def test_orders_of_the_command(
    monkeypatch: pytest.MonkeyPatch, orders: list[str], opened: bool, begun: int, codes: list[int]
) -> None:
    shutdown, begins, cuts = Shutdown(1.0), list[None](), list[int]()
    monkeypatch.setattr(shutdown, "begin", lambda: begins.append(None))
    monkeypatch.setattr(shutdown, "cut_now", cuts.append)

    async def test() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            control = Control(theirs, shutdown, 1)
            ours.sendall(b"".join(json.dumps(order).encode() + b"\n" for order in orders))  # they are read together
            while not (begins or cuts or control.opened.is_set()):
                await asyncio.sleep(0.001)
            assert control.opened.is_set() is opened
            control.close()
            assert not asyncio.get_running_loop().remove_reader(theirs)

    run(test)
    assert (len(begins), cuts) == (begun, codes)


def test_the_start_of_a_front_end_travels_as_a_file() -> None:
    settings = ServerSettings(port=7, api_keys=("a-long-enough-key",), served_model_names=("a", "b"))
    args = EngineArgs(
        model="m", hf_overrides={"a": [1]}, data_parallel_size=2, allowed_media_domains=("images.example.com",)
    )
    start = FrontEndStart(settings=settings, args=args, index=3, is_replacement=True)
    with start.to_file() as file:
        assert FrontEndStart.from_file(os.dup(file.fileno())) == start


class Command:
    """The command's end of `main`, whose engine's start and server are played."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.defect: Exception | None = None
        self.opened: list[socket.socket] = []
        self.control, self.theirs = socket.socketpair()
        self.listener = socket.create_server(("127.0.0.1", 0))

    def server(self, settings: Any, ssl_context: Any, start: Any, shutdown: Shutdown, *, accepts_early: bool) -> Any:
        assert ssl_context is None
        self.calls.append((settings, accepts_early))
        self.start, self.shutdown = start, shutdown
        return self

    async def run(self, listener: socket.socket) -> int:
        self.calls.append(("listens", listener.getsockname()))
        self.model = await self.start()
        return 7

    def open(self, *, fileno: int) -> socket.socket:
        """The process would leave its sockets to the kernel."""
        self.opened.append(socket.socket(fileno=fileno))
        return self.opened[-1]

    def find(self, name: str) -> Any:
        self.calls.append(name.rpartition(".")[2])
        return SimpleNamespace(use_files_of=lambda index: self.calls.append(index), start=self.start_engine)

    async def start_engine(self, settings: Any, args: Any, clock: Any, **options: Any) -> Any:
        self.calls.append((settings, args, len(options["engine_sockets"]), options["records_engine"]))
        if self.defect is not None:
            raise self.defect
        return SimpleNamespace(description="the model", close=self.close)

    async def close(self) -> None:
        self.calls.append("closed")

    def main(self, index: int, is_replacement: bool) -> int | None:
        """Returns the exit code."""
        args = EngineArgs(model="m", data_parallel_size=2)
        start = FrontEndStart(settings=SETTINGS, args=args, index=index, is_replacement=is_replacement)
        with start.to_file() as file:
            ends = [os.dup(each.fileno()) for each in (self.listener, self.theirs, file)]
        sys.argv = ["front_end_main", "inflight: front end", *map(str, ends)]
        try:
            return main()
        except SystemExit as left:
            return int(str(left.code))


SETTINGS = ServerSettings(port=7, shutdown_timeout=3.0)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    command = Command()
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(front_end_main, "Server", command.server)
    monkeypatch.setattr(front_end_main, "exit_now", sys.exit)
    monkeypatch.setattr(front_end_main, "name_process", command.calls.append)
    monkeypatch.setattr(importlib, "import_module", command.find)
    own_socket = SimpleNamespace(socket=command.open, recv_fds=socket.recv_fds)
    monkeypatch.setattr(front_end_main, "socket", own_socket)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield command
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    for each in (command.control, command.theirs, command.listener, *command.opened):
        each.close()


@pytest.mark.parametrize(("index", "is_replacement"), [(0, False), (1, True)])
def test_a_front_end_reports_that_it_is_ready_and_waits_for_the_order_to_answer(
    command: Command, index: int, is_replacement: bool
) -> None:
    LineWire(command.control).send(OPEN)
    assert command.main(index, is_replacement) == 7
    settings, args = SETTINGS, EngineArgs(model="m", data_parallel_size=2)
    assert command.calls == [
        "inflight: front end",
        (settings, not is_replacement),
        ("listens", command.listener.getsockname()),
        "exposition",
        index,
        "engine_start",
        (settings, args, 2, index == 0),
    ]
    assert json.loads(command.control.recv(1000)) == {"ready": "the model"}
    assert command.model.description == "the model"
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    assert [signal.getsignal(number) for number in numbers] == [signal.SIG_IGN] * 3, "the command tells it when to end"


def test_a_front_end_reports_why_it_cannot_start(command: Command) -> None:
    command.defect = ConfigError("a wrong file")
    assert command.main(0, False) == EXIT_FAILED
    assert json.loads(command.control.recv(1000)) == {"failed": ["ConfigError", "a wrong file"]}
    command.control.close()  # nobody hears the next report
    assert command.main(0, False) == EXIT_FAILED


def test_a_model_that_is_never_opened_is_closed(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run_and_cancel(listener: socket.socket) -> int:
        task = asyncio.ensure_future(command.start())
        while not ready:
            ready.extend(await asyncio.get_running_loop().sock_recv(command.control, 1000))
        task.cancel()
        await asyncio.wait([task])
        return 5

    ready: list[int] = []
    command.control.setblocking(False)
    monkeypatch.setattr(command, "run", run_and_cancel)
    assert command.main(0, False) == 5
    assert command.calls[-1] == "closed"
