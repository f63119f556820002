"""`LineWire`: the wire between a process and one that it has started: messages as lines of JSON, which may bring descriptors.

The engine's process and its owner talk in this way (engine/process/engine_process.py), and so do a front end's process and the
command (entrypoints/serve/front_end_main.py). Ranks, whose messages are large, have frames instead (streams.py).
"""

import json
import socket
import threading
from collections.abc import Sequence
from typing import Any

READ_BYTES = 65536


class LineWire:
    """One end. It does not own the socket. One thread may receive, and any thread may send."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lock = threading.Lock()  # held while one line is sent
        self._received = b""  # the beginning of a line
        self._fd: int | None = None  # the descriptor that came with this beginning

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """
        Raises:
            OSError: the peer is gone; or the socket does not block, and has no room.
        """
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            if fds:
                socket.send_fds(self._socket, [line], list(fds))
            else:
                self._socket.sendall(line)

    def receive(self) -> list[tuple[Any, int | None]]:  # Any: JSON
        """Read once. Returns the messages that are complete now, each with the descriptor that it has brought, which belongs to
        the caller. It is None if the message had none, or if this process has no free descriptor.

        Raises:
            EOFError: the peer is gone.
            OSError: the stream was lost; `BlockingIOError`: the socket does not block, and there is nothing to read.
        """
        received, fds, _, _ = socket.recv_fds(self._socket, READ_BYTES, 1)
        if not received:
            raise EOFError
        *lines, self._received = (self._received + received).split(b"\n")
        found: list[tuple[Any, int | None]] = [(json.loads(line), None) for line in lines]
        if found and self._fd is not None:  # it came with the beginning of the first line
            found[0] = found[0][0], self._fd
            self._fd = None
        if fds and self._received:  # a read ends with the bytes that have brought a descriptor: they are no whole line
            self._fd = fds[0]
        elif fds:
            found[-1] = found[-1][0], fds[0]
        return found
