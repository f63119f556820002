"""`Strangers`: accepted connections whose peers have not proved yet that they know the token (handshake.py).

Ranks, replicas and the meshes between ranks accept connections with it. It does not wait: its owner watches the listener and
the strangers with an event loop or with `poll`, and calls `accept`, `receive` and `drop_late`. Nothing that a stranger sends is
decoded, and no stranger delays another one.
"""

import math
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from inflight.handshake import Acceptance, address_bytes

# At most this many strangers may be connected. If another one comes, the oldest is dropped: a peer that knows the token proves
# it at once.
MAX_STRANGERS = 256


@dataclass(slots=True)
class _Stranger:
    host: str
    acceptance: Acceptance
    deadline: float  # a time of `time.monotonic()`


class Strangers:
    """Iterating yields the connections, the oldest first.

    Args:
        purpose, who_bytes: see `Acceptance`.
        token_of: name of a peer -> its token; None if nobody with this name may connect.
        on_drop: called with a connection, the peer's host and the reason, before the connection is closed. The host is "" if
            too many connections have come.
        signs_address: whether a proof is only valid for the address at which this process was reached.
    """

    def __init__(
        self,
        purpose: bytes,
        who_bytes: int,
        token_of: Callable[[bytes], bytes | None],
        on_drop: Callable[[socket.socket, str, str], None],
        *,
        signs_address: bool = False,
    ) -> None:
        self._purpose = purpose
        self._who_bytes = who_bytes
        self._token_of = token_of
        self._on_drop = on_drop
        self._signs_address = signs_address
        self._strangers: dict[socket.socket, _Stranger] = {}

    def __iter__(self) -> Iterator[socket.socket]:
        return iter(list(self._strangers))

    @property
    def next_deadline(self) -> float:
        """When the next stranger is too late, as a time of `time.monotonic()`."""
        return min((stranger.deadline for stranger in self._strangers.values()), default=math.inf)

    def accept(self, listening: socket.socket, seconds: float) -> socket.socket | None:
        """Accept a connection, and greet its peer, which has `seconds` to prove that it knows the token. Returns the
        connection; None if it has ended at once.

        Raises:
            OSError: the peer has already left, this process has no free descriptor, or the listener is broken.
        """
        connected, peer = listening.accept()
        if len(self._strangers) >= MAX_STRANGERS:
            self._drop(next(iter(self._strangers)), "too many connections have proved nothing", is_named=False)
        connected.setblocking(False)
        host = str(peer[0]) if peer else "this machine"
        try:
            address = address_bytes(connected.getsockname()) if self._signs_address else b""
            acceptance = Acceptance(self._purpose, self._who_bytes, address)
            connected.sendall(acceptance.greeting)  # a new connection has room for it
        except OSError as error:
            self._on_drop(connected, host, _lost(error))
            connected.close()
            return None
        self._strangers[connected] = _Stranger(host, acceptance, time.monotonic() + seconds)
        return connected

    def host_of(self, connected: socket.socket) -> str:
        """The address from which a stranger has connected."""
        return self._strangers[connected].host

    def receive(self, connected: socket.socket) -> bytes | None:
        """Read more of a stranger's answer, when there is something to read. Returns who it has proved to be: then the
        connection belongs to the caller. Returns None if the answer is not complete, or if the stranger was dropped."""
        acceptance = self._strangers[connected].acceptance
        try:
            received = connected.recv(acceptance.num_missing)
            acceptance.add(received)
            if not received:
                self.drop(connected, "it closed its stream before it had proved that it knows the token")
                return None
            if acceptance.num_missing:
                return None
            who, verdict = acceptance.judge(self._token_of)
            connected.sendall(verdict)
        except BlockingIOError:
            return None
        except OSError as error:
            self.drop(connected, _lost(error))
            return None
        if who is None:
            self.drop(connected, "its INFLIGHT_CLUSTER_TOKEN is not the same as here")
        else:
            del self._strangers[connected]
        return who

    def drop(self, connected: socket.socket, reason: str) -> None:
        self._drop(connected, reason, is_named=True)

    def drop_late(self) -> None:
        """Drop the strangers that have not proved in time that they know the token."""
        now = time.monotonic()
        for connected, stranger in list(self._strangers.items()):
            if stranger.deadline <= now:
                self.drop(connected, "it has not proved in time that it knows the token")

    def close(self) -> None:
        """Close all connections. `on_drop` is not called."""
        for connected in self:
            connected.close()
        self._strangers.clear()

    def _drop(self, connected: socket.socket, reason: str, *, is_named: bool) -> None:
        stranger = self._strangers.pop(connected)
        self._on_drop(connected, stranger.host if is_named else "", reason)
        connected.close()


def _lost(error: OSError) -> str:
    return f"its stream was lost: {error.strerror or error}"
