"""What the command and its front ends say to each other, over a socket pair each; used where there are several.

command    -- a start: length, JSON with the settings and their keys -->  front end
command    -- an order, a byte -->  front end;   with ENGINE comes the socket to the engine
front end  -- a line of JSON: {"ready": description} or {"failed": [class name, message]} -->  command

The end of the socket: the other one is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from dataclasses import asdict, dataclass
from typing import Any

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.shutdown import Shutdown
from inflight.errors import InflightError

ENGINE, OPEN, DRAIN, CUT = b"e", b"o", b"d", b"c"
EXIT_COMMAND_GONE = 3
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class FrontEndStart:
    settings: ServerSettings
    args: EngineArgs
    records_engine: bool

    def send(self, control: socket.socket) -> None:
        content = json.dumps(asdict(self)).encode()
        control.sendall(_LENGTH.pack(len(content)) + content)

    @classmethod
    def receive(cls, control: socket.socket) -> FrontEndStart | None:
        """None if the command is gone. Not a byte behind it is read."""
        head = control.recv(_LENGTH.size, socket.MSG_WAITALL)
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else -1
        content = control.recv(length, socket.MSG_WAITALL) if length > 0 else b""
        if len(content) != length:
            return None
        values: dict[str, Any] = json.loads(content)  # Any: the fields check their values
        settings: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values["settings"].items()
        }
        return cls(
            settings=ServerSettings(**settings),
            args=EngineArgs(**values["args"]),
            records_engine=values["records_engine"],
        )


class Control:
    """A front end's end of the socket, on its event loop. Orders to stop reach `shutdown`.

    Attributes:
        engine_socket: once it has come.
        opened: the order to take requests has come.
    """

    def __init__(self, control: socket.socket, shutdown: Shutdown) -> None:
        loop = asyncio.get_running_loop()
        self.engine_socket: asyncio.Future[socket.socket] = loop.create_future()
        self.opened = asyncio.Event()
        self._socket = control
        self._shutdown = shutdown
        loop.add_reader(control, self._read)

    def _read(self) -> None:
        orders, fds, _, _ = socket.recv_fds(self._socket, 64, 1)
        for fd in fds:
            self.engine_socket.set_result(socket.socket(fileno=fd))
        if OPEN in orders:
            self.opened.set()
        if DRAIN in orders:
            self._shutdown.begin()
        if CUT in orders or not orders:
            self._shutdown.cut_now(EXIT_COMMAND_GONE)
        if not orders:
            self.close()

    def close(self) -> None:
        """Orders are no longer read. The socket stays open: its end is the end of this process."""
        asyncio.get_running_loop().remove_reader(self._socket)


def tell_ready(control: socket.socket, description: str) -> None:
    _tell(control, {"ready": description})


def tell_failure(control: socket.socket, error: InflightError) -> None:
    _tell(control, {"failed": [type(error).__name__, str(error)]})


def _tell(control: socket.socket, report: object) -> None:
    with contextlib.suppress(OSError):  # the command is gone: the reader hears of it
        control.sendall(json.dumps(report).encode() + b"\n")
