"""`SocketChannel`: sends tensors over one TCP connection. `SocketMesh`: connects the processes of the ranks."""

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from inflight.distributed.channel import Channel
from inflight.errors import LostPeerError, SilentPeerError
from inflight.handshake import address_bytes, introduce
from inflight.strangers import Strangers

_NAME_BYTES = 32
_CHANNEL = struct.Struct(f">II{_NAME_BYTES}s")  # rank that connects, rank that accepts, name of the channel
_PURPOSE = b"mesh"  # of the handshake, in which a rank says which channel it wants
_HELLO_SECONDS = 5.0  # a new connection is closed if it has not proved in this time that it knows the token
_CONNECT_SECONDS = 5.0  # the kernel of the peer's machine accepts a connection at once, even if the peer is busy
_LISTENER_SECONDS = 0.01  # the time between two attempts to reach a listener


class SocketChannel(Channel):
    """Owns the socket. If this end or the peer closes the channel, or the peer dies, a waiting call raises ConnectionError.

    Args:
        timeout_seconds: how long `receive` waits for the next bytes, and how long `send` may take for a whole tensor.
    """

    def __init__(self, connection: socket.socket, peer: int, timeout_seconds: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(timeout_seconds)
        self._socket = connection
        self._peer = peer
        self._timeout = timeout_seconds
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._closed = False

    def send(self, tensor: Tensor) -> None:
        with self._sending:
            try:
                self._socket.sendall(bytes_of(tensor))
            except OSError as error:
                raise self._failure(error) from error

    def receive(self, tensor: Tensor) -> None:
        left = bytes_of(tensor)
        with self._receiving:
            while left:
                try:
                    count = self._socket.recv_into(left)
                except OSError as error:
                    raise self._failure(error) from error
                if count == 0:
                    raise self._failure(ConnectionError("the connection was closed"))
                left = left[count:]

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):  # the peer may have closed the connection before
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the threads that wait for the socket
        # wait until no thread uses the socket, because another file may get its descriptor number
        with self._sending, self._receiving:
            self._socket.close()

    def _failure(self, error: OSError) -> OSError:
        if self._closed:
            return ConnectionError(f"the channel to rank {self._peer} was closed here")
        if isinstance(error, TimeoutError):
            return SilentPeerError(f"rank {self._peer} was silent for {self._timeout:g} s", self._peer)
        return LostPeerError(f"lost rank {self._peer}: {error}", self._peer)


class SocketMesh:
    """One rank's listener, and its connections to other ranks. Of two ranks, the rank with the lower number connects.

    Both ranks prove that they know the token, and at which address the rank that accepts was reached (inflight/handshake.py).
    So it does not matter who tells the addresses: a stranger can neither take the place of a rank nor stand between two. The
    rank that connects waits until the other one accepts connections, in any call of `connection`.

    Args:
        listener: listens at the address at which the other ranks reach this rank. The mesh owns it.
        token: the same secret on all ranks.
        address_of: waits until it is known where a rank listens, and returns this address.
    """

    def __init__(
        self,
        rank: int,
        listener: socket.socket,
        token: bytes,
        address_of: Callable[[int], tuple[str, int]],
        timeout_seconds: float,
    ) -> None:
        self._rank = rank
        self._token = token
        self._timeout = timeout_seconds
        self._address_of = address_of
        self._listener = listener
        listener.setblocking(False)
        self._lock = threading.Lock()  # for the next three
        self._accepted: dict[tuple[int, str], socket.socket] = {}
        self._connecting: set[socket.socket] = set()
        self._is_closed = False
        self._accepting = threading.Lock()  # for the listener and the next attribute
        # no method of the mesh: in a cycle of references, the mesh and its `address_of` would live until a garbage collection
        self._strangers = Strangers(
            _PURPOSE, _CHANNEL.size, partial(_token_of, rank, token), _ignore, signs_address=True
        )

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return host, port

    def channel(self, peer: int, name: str) -> SocketChannel:
        """Returns a channel for tensors over a new `connection`."""
        return SocketChannel(self.connection(peer, name), peer, self._timeout)

    def connections(self, peers: Iterable[int], name: str) -> dict[int, socket.socket]:
        """A new `connection` to each of `peers`, by peer. If one cannot be made, the others are closed."""
        with contextlib.ExitStack() as opened:
            found = {peer: opened.enter_context(self.connection(peer, name)) for peer in peers}
            opened.pop_all()
        return found

    def connection(self, peer: int, name: str) -> socket.socket:
        """A new connection to `peer` for the channel `name`.

        Raises:
            SilentPeerError: the peer did not come in time.
            LostPeerError: the peer cannot be reached.
            ConnectionError: the mesh was closed, or its listener is broken.
        """
        assert peer != self._rank and len(name.encode()) <= _NAME_BYTES, (peer, name)
        try:
            if self._rank < peer:
                return self._connect(peer, name)
            return self._accept(peer, name)
        except SilentPeerError:
            self._raise_if_closed()
            raise
        except OSError as error:  # for example "no route to host"
            self._raise_if_closed()
            message = f"rank {self._rank} cannot reach rank {peer}: {error}"
            # if the listener of this rank is broken, the peer is not to blame
            raise (LostPeerError(message, peer) if self._rank < peer else ConnectionError(message)) from error

    def close(self) -> None:
        """Let every wait for a connection fail, now and later. Connections that were returned stay open. Idempotent. Any
        thread may call it."""
        with self._lock:
            self._is_closed = True
            waiting = [self._listener, *self._connecting]
            while self._accepted:
                self._accepted.popitem()[1].close()
        for waited in waiting:
            with contextlib.suppress(OSError):
                waited.shutdown(socket.SHUT_RDWR)  # wakes the threads that wait for the socket
        # wait until no thread uses the listener, because another file may get its descriptor number
        with self._accepting:
            self._listener.close()
            self._strangers.close()

    def _connect(self, peer: int, name: str) -> socket.socket:
        host, port = self._address_of(peer)
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        connection = socket.socket(family, kind, protocol)
        try:
            with self._closing_wakes(connection):
                connection.settimeout(min(_CONNECT_SECONDS, self._timeout))
                connection.connect(address)
                connection.settimeout(self._timeout)
                channel = _CHANNEL.pack(self._rank, peer, name.encode())
                reached = address_bytes(connection.getpeername())
                try:
                    introduce(connection, _PURPOSE, channel, self._token, reached)
                except TimeoutError:
                    raise SilentPeerError(f"rank {peer} did not answer within {self._timeout:g} s", peer) from None
        except BaseException:
            connection.close()
            raise
        return connection

    def _accept(self, peer: int, name: str) -> socket.socket:
        end = time.monotonic() + self._timeout
        with self._accepting:
            while (found := self._take(peer, name)) is None:
                if time.monotonic() > end:
                    raise SilentPeerError(f"rank {peer} did not connect within {self._timeout:g} s", peer)
                self._meet_strangers(end)
        return found

    def _meet_strangers(self, end: float) -> None:
        """Wait for a new connection, or for bytes of a stranger, until `end`. Keep a stranger that has proved that it knows the
        token. A silent stranger delays nobody, and is dropped after _HELLO_SECONDS."""
        poll = select.poll()
        for waited in (self._listener, *self._strangers):
            poll.register(waited, select.POLLIN)
        until = min(end, self._strangers.next_deadline)
        milliseconds = max(until - time.monotonic(), 0.0) * 1000 + 1
        ready = {fd for fd, _ in poll.poll(milliseconds)}
        for stranger in self._strangers:
            if stranger.fileno() in ready and (who := self._strangers.receive(stranger)) is not None:
                self._keep(stranger, _channel_of(who))
        self._strangers.drop_late()
        if self._listener.fileno() in ready:
            with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # the peer has already left
                self._strangers.accept(self._listener, _HELLO_SECONDS)

    def _keep(self, connection: socket.socket, channel: tuple[int, str]) -> None:
        with self._lock:
            if self._is_closed:
                connection.close()
            else:
                connection.settimeout(self._timeout)
                self._accepted[channel] = connection

    def _take(self, peer: int, name: str) -> socket.socket | None:
        with self._lock:
            self._raise_if_closed()
            return self._accepted.pop((peer, name), None)

    @contextlib.contextmanager
    def _closing_wakes(self, connection: socket.socket) -> Iterator[None]:
        """While the context is open, `close` wakes a thread that waits for `connection`."""
        with self._lock:
            self._raise_if_closed()
            self._connecting.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connecting.remove(connection)

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise ConnectionError(f"rank {self._rank} has stopped its communication")


def _token_of(rank: int, token: bytes, channel: bytes) -> bytes | None:
    return token if _CHANNEL.unpack(channel)[1] == rank else None


def _ignore(connection: socket.socket, host: str, reason: str) -> None:
    """Nobody wants to know which strangers were dropped."""


def _channel_of(channel: bytes) -> tuple[int, str]:
    """The rank that connects, and the name of the channel."""
    caller, _, name = _CHANNEL.unpack(channel)
    return caller, name.rstrip(b"\0").decode()


def local_address(host: str, port: int) -> str:
    """The address of this machine on the network interface through which it reaches `host`."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing, because it is a datagram socket
        return str(probe.getsockname()[0])


def wait_for_listener(host: str, port: int, timeout_seconds: float) -> None:
    """Wait until something listens at this address, or until the timeout. Call this before you make a TCPStore that connects
    to the address, because a TCPStore whose first attempt fails waits half a second before the next attempt."""
    end = time.monotonic() + timeout_seconds
    while time.monotonic() < end:
        try:
            socket.create_connection((host, port), timeout=max(end - time.monotonic(), 1e-3)).close()
            return
        except OSError:
            time.sleep(_LISTENER_SECONDS)


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu", (
        f"only contiguous CPU tensors can be sent; this one is on {tensor.device}, with strides {tensor.stride()}"
    )
    return tensor.view(-1).view(torch.uint8).numpy().data
