"""`Exchange`: sends bytes between all ranks of a group at the same time, over one TCP connection to each of them."""

import contextlib
import select
import socket
import threading
from collections.abc import Mapping, Sequence

from inflight.errors import LostPeerError, SilentPeerError

Bytes = memoryview | bytes
_PEER_HAS_CLOSED = getattr(select, "POLLRDHUP", select.POLLHUP)  # only Linux has POLLRDHUP


class Exchange:
    """One rank's end. It owns the connections. All ranks call `swap` in the same order, from one thread at a time.

    Args:
        size, rank: the number of ranks of the group, and the rank of this end.
        connections: rank -> the connection to this rank, for all other ranks.
        timeout_seconds: the longest wait for a byte to arrive or to be sent.
        ranks: the global ranks of the group, for errors. By default the group has all ranks.

    Attributes:
        is_waiting: whether this rank waits for other ranks.
    """

    def __init__(
        self,
        size: int,
        rank: int,
        connections: Mapping[int, socket.socket],
        timeout_seconds: float,
        ranks: Sequence[int] = (),
    ) -> None:
        self.size, self.rank = size, rank
        self.ranks = ranks or range(size)
        self.is_waiting = False
        self.timeout_seconds = timeout_seconds
        self._connections = connections
        self._swapping = threading.Lock()
        self._end: Exception | None = None  # the first error, or the reason why this rank has left
        for connection in connections.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks have the same IP address, as seen from this rank."""
        return all(each.getsockname()[0] == each.getpeername()[0] for each in self._connections.values())

    def swap(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, memoryview]) -> None:
        """Send `outgoing[peer]` to each peer that is named there, and fill `incoming[peer]` with the bytes of each peer that is
        named there. The two ends of a connection must agree on the number of bytes.

        Raises:
            ConnectionError: this rank has left, or an earlier call has failed.
            LostPeerError: a peer has left or died, or the link to it is broken.
            SilentPeerError: the peers were silent for too long.
        """
        unsent = {peer: memoryview(data) for peer, data in outgoing.items() if len(data)}
        unread = {peer: view for peer, view in incoming.items() if len(view)}
        with self._swapping:
            try:
                while unsent or unread:
                    if not self._move(unsent, unread):
                        self._wait(unsent, unread)
            except OSError as error:
                if self._end is not None:
                    raise ConnectionError(str(self._end)) from error
                self._end = error
                self._shut_down()  # so that the waits of the peers fail, too
                raise

    def swap_records(self, record: bytes) -> list[bytes]:
        """Send `record` to all peers. Returns the records of all ranks in rank order. All records must have the same length."""
        received = {peer: bytearray(len(record)) for peer in self._connections}
        self.swap(dict.fromkeys(received, record), {peer: memoryview(data) for peer, data in received.items()})
        return [record if rank == self.rank else bytes(received[rank]) for rank in range(self.size)]

    def close(self) -> None:
        """Let every wait fail, at this end and at the peers' ends, now and later. Idempotent. Any thread may call it."""
        self._end = self._end or ConnectionError("this rank has stopped its communication")
        self._shut_down()
        # wait until no thread uses the connections, because other files may get their descriptor numbers
        with self._swapping:
            for connection in self._connections.values():
                connection.close()

    def _move(self, unsent: dict[int, memoryview], unread: dict[int, memoryview]) -> bool:
        """Send and receive the bytes that can be moved without waiting. Returns whether any bytes were moved."""
        moved = False
        for left, is_sent in ((unsent, True), (unread, False)):
            for peer, view in list(left.items()):
                connection = self._connections[peer]
                try:
                    count = connection.send(view) if is_sent else connection.recv_into(view)
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise self._lost(peer, str(error)) from error
                if count == 0:
                    raise self._lost(peer)
                moved = True
                if count == len(view):
                    del left[peer]
                else:
                    left[peer] = view[count:]
        return moved

    def _wait(self, unsent: dict[int, memoryview], unread: dict[int, memoryview]) -> None:
        """Wait until something can be sent or received. Also watch the peers with which this call has finished: if such a peer
        leaves, the waits of the other peers fail, so their bytes may never come.

        Raises:
            LostPeerError: a peer with which this call has finished has left.
            SilentPeerError: nothing could be sent or received in time.
        """
        poll = select.poll()
        needed = unsent.keys() | unread.keys()
        for peer, connection in self._connections.items():
            wanted = (select.POLLOUT if peer in unsent else 0) | (select.POLLIN if peer in unread else 0)
            poll.register(connection, wanted or _PEER_HAS_CLOSED)
        self.is_waiting = True
        try:
            ready = {number for number, _ in poll.poll(self.timeout_seconds * 1000)}
        finally:
            self.is_waiting = False
        if not ready:
            silent = [self.ranks[peer] for peer in sorted(needed)]
            message = f"ranks {', '.join(map(str, silent))} were silent for {self.timeout_seconds:g} s"
            raise SilentPeerError(message, *silent)
        for peer, connection in self._connections.items():
            if peer not in needed and connection.fileno() in ready:
                raise self._lost(peer)

    def _lost(self, peer: int, reason: str = "it has closed the connection") -> LostPeerError:
        return LostPeerError(f"lost rank {self.ranks[peer]}: {reason}", self.ranks[peer])

    def _shut_down(self) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # the peer may have closed the connection before
                connection.shutdown(socket.SHUT_RDWR)
