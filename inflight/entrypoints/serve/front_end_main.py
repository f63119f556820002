"""The program of one front end (a process that serves HTTP, if there are several), and its messages with `inflight serve`.

    inflight.entrypoints.serve.front_end_main TITLE LISTENER_FD CONTROL_FD START_FD

START_FD is a file in memory with a `FrontEndStart` as JSON, which includes API keys. CONTROL_FD is one end of a socket pair.
The process of `inflight serve` (the command) has the other end. The messages (`LineWire`) are

command    -- "open": answer requests; "drain", "cut": end;
              {"engine": i}, which brings a socket to a new process of replica i;
              {"gone": i}: replica i is given up, or away if it is on another machine -->  front end
front end  -- {"ready": description} or {"failed": [class name, message]} -->  command

If the socket is closed, the process at the other end has ended. If the command has ended, the front end ends at once. A
terminal or systemd sends SIGINT and SIGTERM to all processes. A front end ignores these signals, because the command tells it
when to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import socket
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TextIO

import uvloop

from inflight.config.engine_args import EngineArgs
from inflight.engine.serving.engine_sockets import EngineSockets
from inflight.entrypoints.serve.server import Server, StartUpClock
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.shutdown import SIGNALS, Shutdown
from inflight.entrypoints.serve.tls import make_ssl_context
from inflight.errors import EngineDeadError, InflightError
from inflight.logs import exit_now
from inflight.processes.child_process import name_process
from inflight.processes.line_wire import LineWire

if TYPE_CHECKING:
    from inflight.entrypoints.serve.engine_start import ServedModel

OPEN, DRAIN, CUT = "open", "drain", "cut"
EXIT_FAILED, EXIT_COMMAND_GONE = 1, 3


@dataclass(frozen=True, kw_only=True)
class FrontEndStart:
    """
    Attributes:
        index: the number of the front end, from 0 on. Number 0 counts and logs the engine's statistics.
        is_replacement: whether this front end replaces a dead one. Then it accepts connections only when it is ready, because
            the server does not start, and clients expect answers.
    """

    settings: ServerSettings
    args: EngineArgs
    index: int
    is_replacement: bool

    def to_file(self) -> TextIO:
        """A file in memory, so that no other process sees the keys."""
        file = open(os.memfd_create("inflight-start"), "w+")  # noqa: SIM115  # the caller closes it
        json.dump(asdict(self), file)
        file.seek(0)
        return file

    @classmethod
    def from_file(cls, fd: int) -> FrontEndStart:
        with open(fd) as file:
            values: dict[str, Any] = json.load(file)  # Any: `ServerSettings` and `EngineArgs` check the values
        return cls(
            settings=ServerSettings(**_with_tuples(values["settings"])),
            args=EngineArgs(**_with_tuples(values["args"])),
            index=values["index"],
            is_replacement=values["is_replacement"],
        )


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples, and no setting is a list."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


class Control:
    """The front end's end of the socket, used on the event loop. It passes "drain" and "cut" to `shutdown`.

    Attributes:
        engine_sockets: the sockets to each replica of the engine that the command has sent.
        opened: set when the command has sent "open".
    """

    def __init__(self, control: socket.socket, shutdown: Shutdown, num_replicas: int) -> None:
        loop = asyncio.get_running_loop()
        self.engine_sockets = [EngineSockets() for _ in range(num_replicas)]
        self.opened = asyncio.Event()
        self._socket = control
        self._wire = LineWire(control)
        self._shutdown = shutdown
        loop.add_reader(control, self._read)

    def _read(self) -> None:
        try:
            arrived = self._wire.receive()
        except EOFError:
            self._shutdown.cut_now(EXIT_COMMAND_GONE)
            self.close()
            return
        for order, fd in arrived:
            match order:
                case {"engine": int(index)} if fd is not None:
                    self.engine_sockets[index].put(socket.socket(fileno=fd))
                case {"gone": int(index)}:
                    gone = EngineDeadError("the engine was given up, or its machine is away")
                    self.engine_sockets[index].fail(gone)
                case "open":
                    self.opened.set()
                case "drain":
                    self._shutdown.begin()
                case "cut":
                    self._shutdown.cut_now(EXIT_COMMAND_GONE)

    def close(self) -> None:
        """Stop reading orders. The socket stays open until this process ends."""
        asyncio.get_running_loop().remove_reader(self._socket)


def report(control: socket.socket, report: object) -> None:
    with contextlib.suppress(OSError):  # if the command has ended, `Control` notices it
        LineWire(control).send(report)


def main() -> int:
    for number in (*SIGNALS, signal.SIGHUP):  # the `Server` handles SIGHUP, once it runs
        signal.signal(number, signal.SIG_IGN)
    name_process(sys.argv[1])
    listener, control = (socket.socket(fileno=int(fd)) for fd in sys.argv[2:4])
    start = FrontEndStart.from_file(int(sys.argv[4]))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            exit_now(runner.run(_serve(start, listener, control)))
    except InflightError as error:
        report(control, {"failed": [type(error).__name__, str(error)]})
        return EXIT_FAILED


async def _serve(start: FrontEndStart, listener: socket.socket, control_socket: socket.socket) -> int:
    shutdown = Shutdown(start.settings.shutdown_timeout)
    control = Control(control_socket, shutdown, len(start.args.served_replicas))
    clock = StartUpClock()

    async def start_model() -> ServedModel:
        exposition = await asyncio.to_thread(importlib.import_module, "inflight.metrics.exposition")
        exposition.use_files_of(start.index)
        engine_start = await asyncio.to_thread(importlib.import_module, "inflight.entrypoints.serve.engine_start")
        clock.mark("importing")
        model: ServedModel = await engine_start.start(
            start.settings, start.args, clock, engine_sockets=control.engine_sockets, records_engine=start.index == 0
        )
        report(control_socket, {"ready": model.description})
        try:
            await control.opened.wait()  # front ends answer requests only when all of them are ready
        except BaseException:
            await model.close()
            raise
        return model

    try:
        server = Server(
            start.settings,
            make_ssl_context(start.settings),
            start_model,
            shutdown,
            accepts_early=not start.is_replacement,
        )
        return await server.run(listener)
    finally:
        control.close()


if __name__ == "__main__":
    exit_now(main())
