"""`ControlSocket`: the engine core's end of the control socket, which engine_process.py describes."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from inflight.engine.process.outbox import Outbox
from inflight.interface.serving import StartEngine
from inflight.interface.statistics import FaultStatus
from inflight.processes.streams import BlockingStream


class FrontEndLink:
    """The connection to one front end. `num_received` is the number of sequences that the front end has sent so far. When the
    front end's stream has ended, `on_end` is called, in the thread that has read it."""

    def __init__(self, index: int, stream: BlockingStream, on_end: Callable[[], None] = lambda: None) -> None:
        self.index, self.on_end = index, on_end
        self.stream = stream
        self.outbox = Outbox(stream, f"inflight-outbox-{index}")
        self.num_received = 0


@dataclass(frozen=True, slots=True)
class Begin:
    """The owner wants this process to load the model and to serve. The fields are those of `EngineProcess.begin`."""

    past: FaultStatus
    fault_time: float
    guilty: frozenset[str]
    recovery_times: tuple[float, ...]


class ControlSocket:
    """This process's end of the control socket. The control thread receives, the main thread sends."""

    def __init__(self, control: socket.socket) -> None:
        self._socket = control
        self._lock = threading.Lock()
        self._received = b""
        self._arrived: list[tuple[FrontEndLink, int] | Begin] = []

    def receive_start(self) -> StartEngine | None:
        """Returns the first frame, or None if the owner is gone."""
        message = BlockingStream(self._socket, read_ahead=False).receive((StartEngine,))
        assert message is None or isinstance(message, StartEngine)
        return message

    def receive(self) -> tuple[FrontEndLink, int] | Begin | None:
        """Answer pings until a front end comes. Returns its link, and how many front ends have died. Or returns `Begin`, or
        None if the owner is gone."""
        while not self._arrived:
            try:
                # one read returns at most one message with a socket
                received, fds, _, _ = socket.recv_fds(self._socket, 4096, 1)
            except OSError:
                return None
            if not received:
                return None
            *lines, self._received = (self._received + received).split(b"\n")
            for line in lines:
                match json.loads(line):
                    case {"ping": _}:
                        self.send({"pong": True})
                    case {"front_end": int(number), "num_deaths": int(num_deaths)}:
                        if not fds:  # this process has no free descriptor, so the kernel has dropped the socket
                            self.send({"unconnected": number})
                            continue
                        link = FrontEndLink(number, BlockingStream(socket.socket(fileno=fds.pop())))
                        self._arrived.append((link, num_deaths))
                    case {
                        "begin": dict(past),
                        "fault_time": float(fault_time),
                        "guilty": list(guilty),
                        "recovery_times": list(times),
                    }:
                        self._arrived.append(Begin(FaultStatus(**past), fault_time, frozenset(guilty), tuple(times)))
        return self._arrived.pop(0)

    def send(self, message: object) -> None:
        with self._lock, contextlib.suppress(OSError):  # the owner is gone; the control thread notices it
            self._socket.sendall(json.dumps(message).encode() + b"\n")
