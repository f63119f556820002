"""TCPStores, through which ranks in different processes exchange addresses, and the socket mesh that the ranks then open.

Everybody who can connect to a TCPStore can read and write it. So each store listens at one address only, and contains no
secret.
"""

from __future__ import annotations

import contextlib
import errno
import struct
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from inflight.distributed.socket_channel import SocketMesh, wait_for_listener
from inflight.errors import ConfigError
from inflight.sockets import listen

_PORT = struct.Struct(">H")


def serve_store(host: str, port: int, listen_fd: int, timeout_seconds: float) -> TCPStore:
    """Serve a store on the socket `listen_fd`, which listens at `host`:`port`. The store owns the descriptor from now on.

    If a TCPStore opened its own socket, it would listen on all interfaces, whatever `host` is. So it gets an open socket.
    """
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )


def serve_launched_store(host: str, port: int, timeout_seconds: float, where: str) -> TCPStore:
    """Serve a store that listens at `host`:`port`, and only there. If this process already serves a store at the port (for
    example for a default group of torch.distributed), return that store. `where`: the address in the user's words, for the
    error message.

    Raises:
        ConfigError: the store cannot listen at the address.
    """
    timeout = timedelta(seconds=timeout_seconds)
    try:
        listener = listen(host, port)
    except OSError as refused:
        if refused.errno == errno.EADDRINUSE:
            with contextlib.suppress(RuntimeError):  # raised if another process has the port
                return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True)
        raise ConfigError(
            f"rank 0 cannot listen at {where}: {refused.strerror or refused}; choose an address of this machine and a port "
            "that is free"
        ) from refused
    return serve_store(host, port, listener.detach(), timeout_seconds)


def reach_store(host: str, port: int, timeout_seconds: float, *, asked: str, where: str) -> TCPStore:
    """Connect to the store at this address. An error message begins with `asked`, and calls the address `where`.

    Raises:
        ConnectionError: the store cannot be reached in time.
    """
    wait_for_listener(host, port, timeout_seconds)
    timeout = timedelta(seconds=timeout_seconds)
    try:
        return TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise ConnectionError(f"{asked} at {where}: {error}") from error


def open_mesh(
    store: Store, rank: int, host: str, token: bytes, timeout_seconds: float, only_host: str | None = None
) -> SocketMesh:
    """Make this rank's `SocketMesh` (its listener and its connections). The ranks find each other's listeners through `store`.
    The mesh keeps the store alive.

    Args:
        token: the secret that ranks need to connect to each other. It must not be in the store.
        only_host: the host of all ranks, whatever the store says; None: the hosts are those in the store.
    """

    def address_of(peer: int) -> tuple[str, int]:
        address, port = ask(store, f"address {peer}").split()
        return only_host or address, int(port)

    mesh = SocketMesh(rank, listen(host, 0), token, address_of, timeout_seconds)
    address, port = mesh.address
    store.set(f"address {rank}", f"{address} {port}")
    return mesh


def meet_store(
    mesh: SocketMesh, rank: int, ranks: Sequence[int], name: str, host: str, timeout_seconds: float
) -> Store:
    """Make a new store for `ranks`. All these ranks call this. The first of these ranks serves the store, at a free port of its
    address. `host`: the address of the calling rank.

    Raises:
        OSError: a rank could not be reached in time, or `mesh` was closed.
    """
    if rank == ranks[0]:
        with listen(host, 0) as listener:
            port = int(listener.getsockname()[1])
            store = serve_store(host, port, listener.detach(), timeout_seconds)
        for peer in ranks[1:]:
            with mesh.connection(peer, f"store of {name}") as connection:
                connection.sendall(_PORT.pack(port) + host.encode())
        return store
    with mesh.connection(ranks[0], f"store of {name}") as connection, connection.makefile("rb") as received:
        address = received.read()
    if len(address) <= _PORT.size:
        raise ConnectionError(f"rank {ranks[0]} has left before rank {rank} got the address of its store")
    (port,), host = _PORT.unpack_from(address), address[_PORT.size :].decode()
    return reach_store(host, port, timeout_seconds, asked=f"rank {rank} cannot reach rank {ranks[0]}", where=host)


def ask(store: Store, key: str) -> str:
    """Wait until a rank has written `key`, and return the value.

    Raises:
        ConnectionError: no rank wrote the key in time.
    """
    try:
        return store.get(key).decode()
    except RuntimeError as error:
        raise ConnectionError(f"no rank has written {key!r} to the store in time: {error}") from error
