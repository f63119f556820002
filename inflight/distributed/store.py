"""Where ranks that are processes leave word for each other: a TCPStore, and the socket mesh that they find through it."""

from __future__ import annotations

import secrets
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from inflight.distributed.socket_channel import TOKEN_BYTES, SocketMesh, wait_for_listener
from inflight.errors import ConfigError


def open_store(
    host: str, port: int, *, serves: bool, timeout_seconds: float, asked: str, where: str, multi_tenant: bool = False
) -> TCPStore:
    """Listen there, or connect to who does.

    `asked` is what could not be reached, for whom, and `where` is how the user knows the address: both for errors.
    With `multi_tenant` another store of this process may serve the port already.

    Raises:
        ConfigError: it cannot listen there.
        ConnectionError: nobody can be reached there in time.
    """
    if not serves:
        wait_for_listener(host, port, timeout_seconds)
    try:
        return TCPStore(
            host,
            port,
            is_master=serves,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            multi_tenant=multi_tenant,
        )
    except RuntimeError as error:
        if serves:
            raise ConfigError(f"rank 0 cannot listen at {where}: {error}; choose a port that is free") from error
        raise ConnectionError(f"{asked} at {where}: {error}") from error


class Meeting:
    """A rank's place in a store: its own listener's address is written there, and rank 0's token, which callers must know.

    Owns `mesh`. The store is the caller's.
    """

    def __init__(self, store: Store, rank: int, host: str, timeout_seconds: float) -> None:
        self._store, self._rank = store, rank
        if rank == 0:
            store.set("token", secrets.token_hex(TOKEN_BYTES))
        token = bytes.fromhex(self.ask("token"))
        self.mesh = SocketMesh(rank, host, token, self._address_of, timeout_seconds)
        address, port = self.mesh.address
        store.set(f"address {rank}", f"{address} {port}")

    def ask(self, key: str) -> str:
        """What a rank has written, or will write.

        Raises:
            ConnectionError: it did not come in time.
        """
        try:
            return self._store.get(key).decode()
        except RuntimeError as error:
            raise ConnectionError(f"rank {self._rank} waited in vain for {key!r}: {error}") from error

    def close(self) -> None:
        """Nothing may be asked after."""
        self.mesh.close()
        del self._store  # it may be the last reference, which ends a server that is here

    def _address_of(self, rank: int) -> tuple[str, int]:
        host, port = self.ask(f"address {rank}").split()
        return host, int(port)
