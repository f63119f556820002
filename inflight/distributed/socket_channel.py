"""`SocketChannel`: sends tensors over one TCP connection. `SocketMesh`: connects the processes of the ranks."""

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from inflight.distributed.channel import Channel
from inflight.errors import LostPeerError, SilentPeerError
from inflight.handshake import Acceptance, address_bytes, introduce

_NAME_BYTES = 32
_CHANNEL = struct.Struct(f">II{_NAME_BYTES}s")  # rank that connects, rank that accepts, name of the channel
_PURPOSE = b"mesh"  # of the handshake, in which a rank says which channel it wants
_HELLO_SECONDS = 5.0  # a new connection is closed if it has not proved in this time that it knows the token
_MAX_STRANGERS = 256  # at most this many connections that have not proved it may be open
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
        self._socket, self._peer, self._timeout = connection, peer, timeout_seconds
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
        self._rank, self._token, self._timeout = rank, token, timeout_seconds
        self._address_of = address_of
        self._listener = listener
        listener.setblocking(False)
        self._lock = threading.Lock()  # for the next three
        self._accepted: dict[tuple[int, str], socket.socket] = {}
        self._connecting: set[socket.socket] = set()
        self._is_closed = False
        self._accepting = threading.Lock()  # for the listener and the next attribute
        # connections without a proof, the oldest first -> when it must be complete, and what of it has been received
        self._strangers: dict[socket.socket, tuple[float, Acceptance]] = {}

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
            return self._connect(peer, name) if self._rank < peer else self._accept(peer, name)
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
            for stranger in self._strangers:
                stranger.close()
            self._strangers.clear()

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
        until = min([end, *(deadline for deadline, _ in self._strangers.values())])
        ready = {fd for fd, _ in poll.poll(max(until - time.monotonic(), 0.0) * 1000 + 1)}
        for stranger in list(self._strangers):
            if stranger.fileno() in ready:
                self._receive_hello(stranger)
            elif self._strangers[stranger][0] < time.monotonic():
                self._drop(stranger)
        if self._listener.fileno() in ready:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):  # the peer has already left
                return
            if len(self._strangers) == _MAX_STRANGERS:
                self._drop(next(iter(self._strangers)))  # the oldest: a rank answers at once
            connection.setblocking(False)
            try:
                acceptance = Acceptance(_PURPOSE, _CHANNEL.size, address_bytes(connection.getsockname()))
                connection.sendall(acceptance.greeting)  # a new connection has room for it
            except OSError:
                connection.close()
                return
            self._strangers[connection] = time.monotonic() + _HELLO_SECONDS, acceptance

    def _drop(self, stranger: socket.socket) -> None:
        del self._strangers[stranger]
        stranger.close()

    def _receive_hello(self, stranger: socket.socket) -> None:
        """Receive more of its answer. If it is complete, keep the connection if the peer knows the token, else close it."""
        _, acceptance = self._strangers[stranger]
        channel = None
        try:
            received = stranger.recv(acceptance.num_missing)
            acceptance.add(received)
            if received and acceptance.num_missing:
                return
            if received:
                who, verdict = acceptance.judge(self._token_of)
                stranger.sendall(verdict)
                channel = None if who is None else _channel_of(who)
        except OSError:
            channel = None
        with self._lock:
            if channel is None or self._is_closed:
                self._drop(stranger)
            else:
                del self._strangers[stranger]
                stranger.settimeout(self._timeout)
                self._accepted[channel] = stranger

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

    def _token_of(self, channel: bytes) -> bytes | None:
        return self._token if _CHANNEL.unpack(channel)[1] == self._rank else None


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
