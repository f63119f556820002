"""How ranks that a launcher (torchrun) has started find each other: through a TCPStore that the launcher or rank 0 serves.

Ranks need a token (a secret) to connect to each other. The token is not in the store, because everybody who can connect to the
store can read and write it, and torchrun's store listens on all interfaces. Instead, an entry of the store tells how to find
the token:

    on one machine         "file FOLDER": the token is in a folder that only this user can open, until all ranks have met
    on several machines    "nonce HEX": the token is the HMAC of the nonce under INFLIGHT_CLUSTER_TOKEN

Every rank knows from its launcher, not from the store, which of the two applies. On one machine the ranks only connect over
loopback, whatever the store says. A rank that connects proves the token, and so does the rank that accepts (socket_channel.py).
"""

import hmac
import ipaddress
import os
import secrets
import socket
import tempfile
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store

from inflight import envs
from inflight.distributed.socket_channel import local_address
from inflight.distributed.store import ask, open_mesh, reach_store, serve_launched_store
from inflight.envs import LaunchedRank
from inflight.errors import ConfigError
from inflight.interface.worker import TOKEN_BYTES, Rendezvous
from inflight.sockets import listen

_TOKEN_FILE = "token"
_FOLDER_PREFIX = "inflight-"
_LOOPBACK = "127.0.0.1"


class LauncherBootstrap:
    """Connects all ranks of one engine to each other. A process may start several engines one after another, each with its own
    bootstrap. Each rank counts them, and only ranks with the same number connect. Close it when all ranks are connected.

    Raises:
        ConfigError: rank 0 cannot listen at MASTER_ADDR; or the ranks are on several machines, but have no common
            INFLIGHT_CLUSTER_TOKEN.
        ConnectionError: the store cannot be reached, or a rank did not connect in time.
    """

    def __init__(self, me: LaunchedRank, timeout_seconds: float) -> None:
        self._me = me
        self._timeout = timeout_seconds
        self._listener: socket.socket | None = None  # of this rank's worker, until `rendezvous` returns it
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # on rank 0: the folder of the token
        attempt = PrefixStore(f"inflight/attempt {me.attempt}", _launched_store(me, timeout_seconds))
        self._store = PrefixStore(f"engine {attempt.add(f'engines of rank {me.rank}', 1)}", attempt)
        # the address at which the other ranks reach this machine
        is_one_node = len(me.local_ranks) == me.world_size
        host = _LOOPBACK if is_one_node else local_address(me.master_addr, me.master_port)
        is_one_machine = ipaddress.ip_address(host).is_loopback
        try:
            self._listener = listen(host, 0)
            self._store.set(f"worker {me.rank}", "{} {}".format(*self._listener.getsockname()[:2]))
            if me.rank == 0:
                self._tell_token(is_one_machine)
            self._token = _find_token(self._store, is_one_machine)
            # before the ranks connect, because afterwards a rank may fail and end with the store that it serves
            asked = [ask(self._store, f"worker {rank}").split() for rank in range(me.world_size)]
            self._addresses = tuple((host if is_one_machine else address, int(port)) for address, port in asked)
            self._mesh = open_mesh(
                self._store, me.rank, host, self._token, timeout_seconds, host if is_one_machine else None
            )
        except BaseException:
            self._free()
            raise

    def rendezvous(self, epoch: int) -> Rendezvous:
        """Returns how the workers find each other: their addresses and the token. Call this only once, because the result owns
        the listening socket."""
        listener, self._listener = self._listener, None
        assert listener is not None, "`rendezvous` was called before"
        return Rendezvous(
            epoch=epoch,
            timeout_seconds=self._timeout,
            token=self._token,
            listen_fd=listener.detach(),
            addresses=self._addresses,
        )

    def connections(self) -> dict[int, socket.socket]:
        """A connection to every other rank, by rank. The caller owns them."""
        try:
            return self._mesh.connections(
                [rank for rank in range(self._me.world_size) if rank != self._me.rank], "executor"
            )
        except OSError as error:
            raise ConnectionError(f"rank {self._me.rank} could not connect to the other ranks: {error}") from error

    def close(self) -> None:
        self._mesh.close()
        del self._mesh
        self._free()

    def _free(self) -> None:
        del self._store  # if this process serves the store, the store ends with its last reference
        if self._listener is not None:
            self._listener.close()
        if self._folder is not None:
            self._folder.cleanup()

    def _tell_token(self, is_one_machine: bool) -> None:
        """Write to the store how to find the token. Only rank 0 calls this."""
        if not is_one_machine:
            envs.cluster_token()  # raises an error here, before the other ranks need the token
            self._store.set("token", f"nonce {secrets.token_hex(TOKEN_BYTES)}")
            return
        self._folder = tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX)  # mode 0700
        Path(self._folder.name, _TOKEN_FILE).write_bytes(secrets.token_bytes(TOKEN_BYTES))
        self._store.set("token", f"file {self._folder.name}")


def _launched_store(me: LaunchedRank, timeout_seconds: float) -> Store:
    where = f"MASTER_ADDR={me.master_addr}, MASTER_PORT={me.master_port}"
    if me.rank == 0 and not me.agent_serves_store:
        return serve_launched_store(me.master_addr, me.master_port, timeout_seconds, where)
    asked = f"rank {me.rank} cannot reach the launcher's store"
    return reach_store(me.master_addr, me.master_port, timeout_seconds, asked=asked, where=where)


def _find_token(store: Store, is_one_machine: bool) -> bytes:
    kind, _, value = ask(store, "token").partition(" ")
    if kind != ("file" if is_one_machine else "nonce"):
        where = "one machine" if is_one_machine else "several machines"
        raise ConfigError(
            f"the ranks are on {where} for this rank, but not for rank 0, which has written {kind[:20]!r} to the launcher's "
            "store: start all of them by the same launcher"
        )
    if kind == "nonce":
        return hmac.digest(envs.cluster_token().encode(), bytes.fromhex(value), "sha256")
    folder = Path(value)
    try:
        status = folder.stat()
        if status.st_uid != os.geteuid():  # anybody can write a folder's name to the store
            raise ConfigError(
                f"the folder {folder}, which should have the ranks' token, belongs to another user: start all ranks as one user"
            )
        # no other file of the user may become the token, because others may know what it contains
        token = (folder / _TOKEN_FILE).read_bytes() if folder.name.startswith(_FOLDER_PREFIX) else b""
        if len(token) != TOKEN_BYTES or status.st_mode & 0o077:
            raise ConfigError(f"{folder} is not a folder that rank 0 has made for the ranks' token")
        return token
    except OSError as error:
        raise ConfigError(
            f"the ranks' token cannot be read from {folder}: {error.strerror}; all ranks that a launcher starts on one machine "
            "must use the same folder for temporary files"
        ) from error
