"""Where ranks that are processes leave word for each other: a TCPStore, and the socket mesh that they find through it.

A TCPStore asks its callers for nothing: whoever reaches its address reads and writes it. So it listens at one address only,
and holds no secret.
"""

from __future__ import annotations

import contextlib
import errno
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from inflight.distributed.socket_channel import SocketMesh, wait_for_listener
from inflight.errors import ConfigError
from inflight.sockets import listen


def serve_store(host: str, port: int, listen_fd: int, timeout_seconds: float) -> TCPStore:
    """A store behind the socket `listen_fd`, which listens at `host`:`port`. The store owns the descriptor from now on.

    A TCPStore that opens its own socket ignores `host` and listens on all interfaces.
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
    """A store that listens at `host`:`port`, and only there; or the one that this process serves at the port already, as a
    default group of torch.distributed does. `where` is how the user knows the address.

    Raises:
        ConfigError: it cannot listen there.
    """
    timeout = timedelta(seconds=timeout_seconds)
    try:
        listener = listen(host, port)
    except OSError as refused:
        if refused.errno == errno.EADDRINUSE:
            with contextlib.suppress(RuntimeError):  # another process has the port
                return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True)
        raise ConfigError(
            f"rank 0 cannot listen at {where}: {refused.strerror or refused}; choose an address of this machine and a port "
            "that is free"
        ) from refused
    return serve_store(host, port, listener.detach(), timeout_seconds)


def reach_store(host: str, port: int, timeout_seconds: float, *, asked: str, where: str) -> TCPStore:
    """Connect to who serves a store there. `asked` is what could not be reached, for whom; `where` is how the user knows the
    address: both for the error.

    Raises:
        ConnectionError: nobody can be reached there in time.
    """
    wait_for_listener(host, port, timeout_seconds)
    timeout = timedelta(seconds=timeout_seconds)
    try:
        return TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise ConnectionError(f"{asked} at {where}: {error}") from error


class Meeting:
    """A rank's place in a store: the address of its own listener is written there. Owns `mesh`. The store is the caller's.

    Args:
        token: what ranks must know to connect to each other. It did not come through the store.
    """

    def __init__(self, store: Store, rank: int, host: str, token: bytes, timeout_seconds: float) -> None:
        self._store, self._rank = store, rank
        self.mesh = SocketMesh(rank, host, token, self._address_of, timeout_seconds)
        address, port = self.mesh.address
        store.set(f"address {rank}", f"{address} {port}")

    def close(self) -> None:
        """Nothing may be asked after."""
        self.mesh.close()
        del self._store  # it may be the last reference, which ends a server that is here

    def _address_of(self, rank: int) -> tuple[str, int]:
        host, port = ask(self._store, f"address {rank}").split()
        return host, int(port)


def ask(store: Store, key: str) -> str:
    """What a rank has written there, or will write.

    Raises:
        ConnectionError: it did not come in time.
    """
    try:
        return store.get(key).decode()
    except RuntimeError as error:
        raise ConnectionError(f"no rank has written {key!r} in time: {error}") from error
