"""`ControlSocket`: the engine core's end of the control socket, which engine_process.py describes."""

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass

from inflight.engine.process.outbox import Outbox
from inflight.interface.serving import StartEngine
from inflight.interface.statistics import FaultStatus
from inflight.processes.line_wire import LineWire
from inflight.processes.streams import BlockingStream


class FrontEndLink:
    """The connection to one front end. `num_received` is the number of sequences that the front end has sent so far. When the
    front end's stream has ended, `on_end` is called, in the thread that has read it."""

    def __init__(self, index: int, stream: BlockingStream, on_end: Callable[[], None] = lambda: None) -> None:
        self.index = index
        self.on_end = on_end
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
        self._wire = LineWire(control)
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
                arrived = self._wire.receive()
            except (EOFError, OSError):
                return None
            for message, fd in arrived:
                match message:
                    case {"ping": _}:
                        self.send({"pong": True})
                    case {"front_end": int(number), "num_deaths": int(num_deaths)}:
                        if fd is None:  # this process has no free descriptor, so the kernel has dropped the socket
                            self.send({"unconnected": number})
                            continue
                        link = FrontEndLink(number, BlockingStream(socket.socket(fileno=fd)))
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
        with contextlib.suppress(OSError):  # the owner is gone; the control thread notices it
            self._wire.send(message)
