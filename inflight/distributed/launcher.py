"""How ranks that a launcher (torchrun) has started find each other: over the store that it serves, or that rank 0 does."""

from __future__ import annotations

import socket

from torch._C._distributed_c10d import PrefixStore

from inflight.distributed.socket_channel import address_family, local_address
from inflight.distributed.store import Meeting, open_store
from inflight.envs import LaunchedRank
from inflight.interface.worker import Rendezvous


class LauncherMeeting:
    """One meeting of all ranks: the n-th that each of them makes is the same. To be closed when all ranks have met.

    Raises:
        ConfigError: rank 0 cannot listen at the master's address.
        ConnectionError: the store cannot be reached, or a rank did not come in time.
    """

    def __init__(self, me: LaunchedRank, timeout_seconds: float) -> None:
        self._me, self._timeout = me, timeout_seconds
        served = open_store(
            me.master_addr,
            me.master_port,
            serves=me.rank == 0 and not me.agent_serves_store,
            timeout_seconds=timeout_seconds,
            asked=f"rank {me.rank} cannot reach the launcher's store",
            where=f"MASTER_ADDR={me.master_addr}, MASTER_PORT={me.master_port}",
            multi_tenant=True,  # a default group of torch.distributed in this process may serve it already
        )
        attempt = PrefixStore(f"inflight/attempt {me.attempt}", served)
        store = PrefixStore(f"meeting {attempt.add(f'meetings of rank {me.rank}', 1)}", attempt)
        self._host = local_address(me.master_addr, me.master_port)
        if me.rank == 0:
            store.set("port", str(self._free_port()))
        self._meeting = Meeting(store, me.rank, self._host, timeout_seconds)

    def rendezvous(self, epoch: int) -> Rendezvous:
        """Where the workers meet: at a port of rank 0's machine, which is the master's, that was free a moment ago."""
        return Rendezvous(
            host=self._me.master_addr, port=int(self._meeting.ask("port")), epoch=epoch, timeout_seconds=self._timeout
        )

    def connections(self) -> dict[int, socket.socket]:
        """One to every other rank, by rank. The caller owns them."""
        found: dict[int, socket.socket] = {}
        try:
            for peer in range(self._me.world_size):
                if peer != self._me.rank:
                    found[peer] = self._meeting.mesh.connection(peer, "executor")
        except OSError as error:
            for connection in found.values():
                connection.close()
            raise ConnectionError(f"rank {self._me.rank} did not meet rank {peer}: {error}") from error
        return found

    def close(self) -> None:
        self._meeting.close()

    def _free_port(self) -> int:
        with socket.create_server((self._host, 0), family=address_family(self._host)) as probe:
            return int(probe.getsockname()[1])
