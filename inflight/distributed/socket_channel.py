"""`SocketChannel`: sends tensors over one TCP connection. `SocketMesh`: connects the processes of the ranks."""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from inflight.distributed.channel import Channel
from inflight.sockets import listen

_CHANNEL = struct.Struct(">II16s")  # rank that connects, rank that accepts, name of the channel
_HELLO_BYTES = _CHANNEL.size + 32  # the hello: the channel, and its HMAC under the token; the token itself is not sent
_HELLO_SECONDS = 5.0  # a new connection is closed if it sends no hello in this time
_LISTENER_SECONDS = 0.01  # the time between two attempts to reach a listener


class SocketChannel(Channel):
    """Owns the socket. If this end or the peer closes the channel, or the peer dies, a waiting call raises ConnectionError.

    Args:
        timeout_seconds: the longest wait for a byte to arrive or to be sent.
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
                self._socket.sendall(_bytes_of(tensor))
            except OSError as error:
                raise self._failure(error) from error

    def receive(self, tensor: Tensor) -> None:
        left = _bytes_of(tensor)
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
            return TimeoutError(f"rank {self._peer} was silent for {self._timeout:g} s")
        return ConnectionError(f"lost rank {self._peer}: {error}")


class SocketMesh:
    """One rank's listener, and its connections to other ranks. Of two ranks, the one with the lower number connects.

    If the peer of a connection does not know the token, the connection is closed.

    Args:
        host: the address at which the other ranks reach this machine.
        token: the same secret on all ranks.
        address_of: waits until it is known where a rank listens, and returns this address.
    """

    def __init__(
        self, rank: int, host: str, token: bytes, address_of: Callable[[int], tuple[str, int]], timeout_seconds: float
    ) -> None:
        self._rank, self._token, self._timeout = rank, token, timeout_seconds
        self._address_of = address_of
        self._listener = listen(host, 0)
        self._accepted: dict[tuple[int, str], socket.socket] = {}

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return host, port

    def channel(self, peer: int, name: str) -> SocketChannel:
        """Returns a channel for tensors over a new `connection`."""
        return SocketChannel(self.connection(peer, name), peer, self._timeout)

    def connection(self, peer: int, name: str) -> socket.socket:
        """A new connection to `peer` for the channel `name`.

        Raises:
            TimeoutError: the peer did not come in time.
            OSError: the peer cannot be reached.
        """
        assert peer != self._rank
        return self._connect(peer, name) if self._rank < peer else self._accept(peer, name)

    def close(self) -> None:
        self._listener.close()
        while self._accepted:
            self._accepted.popitem()[1].close()

    def _connect(self, peer: int, name: str) -> socket.socket:
        connection = socket.create_connection(self._address_of(peer), timeout=self._timeout)
        channel = _CHANNEL.pack(self._rank, peer, name.encode())
        connection.sendall(channel + self._signature(channel))
        return connection

    def _accept(self, peer: int, name: str) -> socket.socket:
        end = time.monotonic() + self._timeout
        while (peer, name) not in self._accepted:
            self._listener.settimeout(max(end - time.monotonic(), 1e-3))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                raise TimeoutError(f"rank {peer} did not connect within {self._timeout:g} s") from None
            hello = self._hello(connection)
            if hello is None:
                connection.close()
            else:
                self._accepted[hello] = connection
        return self._accepted.pop((peer, name))

    def _hello(self, connection: socket.socket) -> tuple[int, str] | None:
        """Returns (rank, name of the channel) from the peer's hello, or None if the peer does not know the token."""
        connection.settimeout(min(_HELLO_SECONDS, self._timeout))
        try:
            hello = connection.recv(_HELLO_BYTES, socket.MSG_WAITALL)
        except OSError:
            return None
        channel, signature = hello[: _CHANNEL.size], hello[_CHANNEL.size :]
        if not hmac.compare_digest(signature, self._signature(channel)):  # also if the hello is too short
            return None
        caller, called, name = _CHANNEL.unpack(channel)
        return (caller, name.rstrip(b"\0").decode()) if called == self._rank else None

    def _signature(self, channel: bytes) -> bytes:
        return hmac.digest(self._token, channel, "sha256")


def local_address(host: str, port: int) -> str:
    """The address of this machine on the network interface through which it reaches `host`."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing, because it is a datagram socket
        return str(probe.getsockname()[0])


def wait_for_listener(host: str, port: int, timeout_seconds: float) -> None:
    """Wait until something listens at this address, or until the timeout. If a TCPStore tries to connect before, it tries again
    only half a second later."""
    end = time.monotonic() + timeout_seconds
    while time.monotonic() < end:
        try:
            socket.create_connection((host, port), timeout=max(end - time.monotonic(), 1e-3)).close()
            return
        except OSError:
            time.sleep(_LISTENER_SECONDS)


def _bytes_of(tensor: Tensor) -> memoryview:
    assert tensor.is_contiguous() and tensor.device.type == "cpu", (
        f"only contiguous CPU tensors can be sent; this one is on {tensor.device}, with strides {tensor.stride()}"
    )
    return tensor.view(-1).view(torch.uint8).numpy().data
