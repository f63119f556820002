"""How ranks that a launcher (torchrun) has started find each other: over the store that it serves, or that rank 0 does."""

from __future__ import annotations

import secrets
import socket
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from inflight.distributed.socket_channel import TOKEN_BYTES, SocketMesh, local_address
from inflight.envs import LaunchedRank
from inflight.errors import ConfigError
from inflight.interface.worker import Rendezvous


class LauncherMeeting:
    """One meeting of all ranks: the n-th that each of them makes is the same. To be closed when all ranks have met.

    Raises:
        ConfigError: rank 0 cannot listen at the master's address.
        ConnectionError: the store cannot be reached, or a rank did not come in time.
    """

    def __init__(self, me: LaunchedRank, timeout_seconds: float) -> None:
        self._me, self._timeout = me, timeout_seconds
        store = PrefixStore(f"inflight/attempt {me.attempt}", _open_store(me, timeout_seconds))
        number = store.add(f"meetings of rank {me.rank}", 1)
        self._store: Store = PrefixStore(f"meeting {number}", store)
        self._host = local_address(me.master_addr, me.master_port)
        if me.rank == 0:
            self._store.set("port", str(self._free_port()))
            self._store.set("token", secrets.token_hex(TOKEN_BYTES))
        token = bytes.fromhex(self._ask("token"))
        self._mesh = SocketMesh(me.rank, self._host, token, self._address_of, timeout_seconds)
        host, port = self._mesh.address
        self._store.set(f"address {me.rank}", f"{host} {port}")

    def rendezvous(self, epoch: int) -> Rendezvous:
        """Where the workers meet: at a port of rank 0's machine, which is the master's, that was free a moment ago."""
        return Rendezvous(
            host=self._me.master_addr, port=int(self._ask("port")), epoch=epoch, timeout_seconds=self._timeout
        )

    def connections(self) -> dict[int, socket.socket]:
        """One to every other rank, by rank. The caller owns them."""
        found: dict[int, socket.socket] = {}
        try:
            for peer in range(self._me.world_size):
                if peer != self._me.rank:
                    found[peer] = self._mesh.connection(peer, "executor")
        except OSError as error:
            for connection in found.values():
                connection.close()
            raise ConnectionError(f"rank {self._me.rank} did not meet rank {peer}: {error}") from error
        return found

    def close(self) -> None:
        self._mesh.close()
        del self._store  # the last reference ends the server, if it is here

    def _free_port(self) -> int:
        with socket.create_server((self._host, 0), family=_family(self._host)) as probe:
            return int(probe.getsockname()[1])

    def _address_of(self, rank: int) -> tuple[str, int]:
        host, port = self._ask(f"address {rank}").split()
        return host, int(port)

    def _ask(self, key: str) -> str:
        """What a rank has written, or will write."""
        try:
            return self._store.get(key).decode()
        except RuntimeError as error:
            raise ConnectionError(f"rank {self._me.rank} waited in vain for {key!r}: {error}") from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _open_store(me: LaunchedRank, timeout_seconds: float) -> TCPStore:
    serves = me.rank == 0 and not me.agent_serves_store
    try:
        return TCPStore(
            me.master_addr,
            me.master_port,
            is_master=serves,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            multi_tenant=True,  # a default group of torch.distributed in the same process may serve it already
        )
    except RuntimeError as error:
        where = f"MASTER_ADDR={me.master_addr}, MASTER_PORT={me.master_port}"
        if serves:
            raise ConfigError(f"rank 0 cannot listen at {where}: {error}; choose a port that is free") from error
        raise ConnectionError(f"rank {me.rank} cannot reach the launcher's store at {where}: {error}") from error
