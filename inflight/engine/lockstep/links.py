"""`LockstepLinks`: connects an engine core with the cores of the other replicas on its machine.

Each core listens at a Unix socket without a file, and connects to the cores of replicas with lower numbers. When a core has
ended, its links end, and those of the next core of the same replica take their place.
"""

import contextlib
import hashlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

from inflight.processes.line_wire import LineWire
from inflight.sockets import connect_locally, listen_locally

logger = logging.getLogger(__name__)

CAME = "came"  # news about a link
LOST = "lost"
RETRY_SECONDS = 0.05
SEND_SECONDS = 1  # a core that reads nothing for so long is lost: its threads that read never wait
_CREDENTIALS = struct.Struct("3i")
_TIMEVAL = struct.Struct("ll")


class LockstepLinks:
    """Any thread may call any method.

    Args:
        replica, num_replicas: the core of `replica` has these links.
        secret: the same text for all cores of the group. The names of their sockets are made from it.
        wake: called in a thread of this object when there is news. Must not block.
    """

    def __init__(self, replica: int, num_replicas: int, secret: str, wake: Callable[[], None]) -> None:
        self._replica = replica
        self._num_replicas = num_replicas
        self._secret = secret
        self._wake = wake
        self._news: SimpleQueue[tuple[int, Any]] = SimpleQueue()  # Any: JSON
        self._has_news = threading.Event()
        self._lock = threading.Lock()  # for the next two
        self._wires: dict[int, tuple[socket.socket, LineWire]] = {}
        self._is_closed = False
        self._listener: socket.socket | None = None
        self._start("accept", self._accept)
        for peer in range(replica):
            self._start(f"to-{peer}", partial(self._keep_link, peer))

    def send(self, peer: int, message: object) -> None:
        """Send a message. If there is no link, or it breaks, the message is dropped."""
        with self._lock:
            found = self._wires.get(peer)
        if found is None:
            return
        connection, wire = found
        try:
            wire.send(message)
        except OSError:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # the thread that reads it notices

    def take_news(self) -> list[tuple[int, Any]]:  # Any: JSON
        """Returns what has come since the last call: (replica, message), (replica, CAME) or (replica, LOST), in order."""
        self._has_news.clear()
        return [self._news.get() for _ in range(self._news.qsize())]

    def wait(self, seconds: float) -> None:
        """Wait for news, at most so long."""
        self._has_news.wait(seconds)

    def close(self) -> None:
        """End all links. Idempotent."""
        with self._lock:
            self._is_closed = True
            connections = [connection for connection, _ in self._wires.values()]
            if self._listener is not None:
                connections.append(self._listener)
        for each in connections:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    # -- threads -----------------------------------------------------------------------------------------------------------

    def _start(self, name: str, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name=f"inflight-lockstep-{name}", daemon=True).start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                listener = listen_locally(self._name(self._replica))
                break
            except OSError:  # the core before this one has not ended yet
                time.sleep(RETRY_SECONDS)
        else:
            return
        with self._lock:
            self._listener = listener
        with listener:
            while not self._is_closed:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                self._start("from", partial(self._greet, connection))

    def _greet(self, connection: socket.socket) -> None:
        """Serve a connection that another core has made."""
        with connection:
            try:
                *_, user, _ = _CREDENTIALS.unpack(
                    connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                )
                if user != os.getuid():
                    return
                wire = LineWire(connection)
                hello, *others = [message for message, _ in wire.receive()]
            except (OSError, EOFError, ValueError):
                return
            match hello:
                case {"replica": int(peer), "secret": self._secret} if self._replica < peer < self._num_replicas:
                    self._read(peer, connection, wire, others)

    def _keep_link(self, peer: int) -> None:
        while not self._is_closed:
            with contextlib.suppress(OSError), connect_locally(self._name(peer)) as connection:
                wire = LineWire(connection)
                wire.send({"replica": self._replica, "secret": self._secret})
                self._read(peer, connection, wire)
            time.sleep(RETRY_SECONDS)

    def _read(self, peer: int, connection: socket.socket, wire: LineWire, first: list[Any] | None = None) -> None:
        """Read a link until it ends."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(SEND_SECONDS, 0))
        with self._lock:
            if self._is_closed:
                return
            old = self._wires.get(peer)
            self._wires[peer] = connection, wire
            if old is not None:
                with contextlib.suppress(OSError):
                    old[0].shutdown(socket.SHUT_RDWR)
                self._news.put((peer, LOST))
            self._news.put((peer, CAME))
        for message in first or ():
            self._news.put((peer, message))
        self._tell()
        with contextlib.suppress(EOFError, OSError, ValueError):
            while True:
                for message, _ in wire.receive():
                    self._news.put((peer, message))
                self._tell()
        with self._lock:
            if self._wires.get(peer, (None, None))[0] is not connection:
                return  # another link has taken its place
            del self._wires[peer]
            self._news.put((peer, LOST))
        self._tell()

    def _tell(self) -> None:
        self._has_news.set()
        if not self._is_closed:
            self._wake()

    def _name(self, replica: int) -> str:
        """The name of the socket of a core. Everybody on the machine can see it, so it does not show the secret."""
        digest = hashlib.sha256(f"socket {self._secret}".encode()).hexdigest()[:32]
        return f"inflight-lockstep-{digest}-{replica}"
