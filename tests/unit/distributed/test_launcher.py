"""How ranks that a launcher has started meet: where they listen, and how they agree on a secret that is in no store."""

from __future__ import annotations

import os
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared.free_port import free_port
from inflight.distributed import launcher
from inflight.distributed.launcher import LauncherBootstrap
from inflight.distributed.store import reach_store
from inflight.envs import LaunchedRank
from inflight.errors import ConfigError
from inflight.sockets import listen
from tests.support.listening import listening_hosts


class Launch:
    """Two ranks, threads of this process. `local`: how many of them are on one machine, as the launcher tells."""

    def __init__(self, local: int) -> None:
        self.port = free_port()
        self._local = local

    def meet(self, rank: int) -> LauncherBootstrap:
        local_ranks = range(2) if self._local == 2 else range(rank, rank + 1)
        me = LaunchedRank(rank, 2, "127.0.0.1", self.port, "0", False, local_ranks)
        return LauncherBootstrap(me, 10.0)

    def both(self) -> list[LauncherBootstrap]:
        with ThreadPoolExecutor(2) as ranks:
            return [met.result(300) for met in [ranks.submit(self.meet, rank) for rank in range(2)]]

    def stored(self) -> str:
        store = reach_store("127.0.0.1", self.port, 5.0, asked="a stranger", where="the store")
        return " ".join(store.get(key).decode() for key in store.list_keys())


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests meet at the same time."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def own_token_folders() -> list[Path]:
    return [path.parent for path in Path(launcher.tempfile.gettempdir()).glob("inflight-*/token")]


@pytest.fixture
def several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.1 is taken for an address that other machines reach."""
    real = launcher.ipaddress.ip_address
    monkeypatch.setattr(launcher.ipaddress, "ip_address", lambda host: real("10.0.0.1"))


@pytest.mark.parametrize("local", [2, 1])
def test_the_token_lies_in_a_folder_until_all_have_met(local: int) -> None:
    launch = Launch(local)
    first, second = launch.both()
    token = first.rendezvous(0).token
    assert token == second.rendezvous(0).token
    assert token.hex() not in launch.stored() and len(token) == 32
    (folder,) = own_token_folders()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert listening_hosts([os.getpid()]) == {"127.0.0.1"}
    for bootstrap in (first, second):
        bootstrap.close()
    assert not folder.exists()


def test_a_folder_of_another_user_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger who writes the store could name one with a token that he knows."""
    monkeypatch.setattr(launcher.os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        Launch(2).meet(0)
    assert own_token_folders() == []


class Told:
    """A store with what a stranger has written."""

    def __init__(self, text: str) -> None:
        self.text = text

    def get(self, _: str) -> bytes:
        return self.text.encode()


def test_no_other_file_of_the_user_becomes_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the folder of the hub's token, whose contents a stranger may know."""
    for name, size, mode in (
        ("cache", 32, 0o700),
        ("inflight-a", 37, 0o700),
        ("inflight-b", 32, 0o755),
        ("inflight-c", 0, 0o700),
    ):
        folder = tmp_path / name
        folder.mkdir(mode=mode)
        (folder / "token").write_bytes(b"x" * size)
        with pytest.raises(ConfigError, match="is not a folder that rank 0 has made"):
            launcher._find_token(Told(f"file {folder}"), True)  # type: ignore[arg-type]  # only `get`
    monkeypatch.setenv("INFLIGHT_CLUSTER_TOKEN", "a secret")
    for text, is_one_machine in (("nonce 00", True), (f"file {folder}", False), ("", True)):
        with pytest.raises(ConfigError, match="start all of them by the same launcher"):
            launcher._find_token(Told(text), is_one_machine)  # type: ignore[arg-type]  # only `get`


def test_on_one_machine_the_ranks_meet_on_loopback_whatever_the_store_says(monkeypatch: pytest.MonkeyPatch) -> None:
    real = launcher.open_mesh

    def tell_a_stranger(store: Any, rank: int, *rest: Any) -> Any:  # Any: of `open_mesh`
        mesh = real(store, rank, *rest)
        store.set(f"address {rank}", f"203.0.113.1 {mesh.address[1]}")
        return mesh

    monkeypatch.setattr(launcher, "open_mesh", tell_a_stranger)
    opened = Launch(2).both()
    with ThreadPoolExecutor(2) as ranks:
        found = [connecting.result(300) for connecting in [ranks.submit(each.connections) for each in opened]]
    for connections in found:
        for connection in connections.values():
            assert connection.getpeername()[0] == "127.0.0.1"
            connection.close()
    for bootstrap in opened:
        bootstrap.close()


@pytest.mark.usefixtures("several_machines")
def test_several_machines_share_the_cluster_s_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFLIGHT_CLUSTER_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="INFLIGHT_CLUSTER_TOKEN"):
        Launch(1).meet(0)
    monkeypatch.setenv("INFLIGHT_CLUSTER_TOKEN", "a secret")
    launch = Launch(1)
    first, second = launch.both()
    token = first.rendezvous(0).token
    assert token == second.rendezvous(0).token
    assert "a secret" not in launch.stored() and token.hex() not in launch.stored()
    for bootstrap in (first, second):
        bootstrap.close()
    again = Launch(1).both()
    assert again[0].rendezvous(0).token != token  # of one bootstrap only
    for bootstrap in again:
        bootstrap.close()


def test_the_rendezvous_is_held_from_its_choice_to_its_use() -> None:
    first, second = Launch(2).both()
    found = [bootstrap.rendezvous(7) for bootstrap in (first, second)]
    assert found[0].addresses == found[1].addresses and found[0].epoch == 7
    for rank, rendezvous in enumerate(found):
        host, port = rendezvous.addresses[rank]
        assert host == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            listen(host, port)
        assert rendezvous.listen_fd is not None
        with socket.socket(fileno=rendezvous.listen_fd) as listener:
            assert listener.getsockname() == (host, port)
    for bootstrap in (first, second):
        bootstrap.close()


def test_no_connection_is_left_if_a_rank_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Launch(2).both()
    made: list[socket.socket] = []

    def connection(peer: int, name: str) -> socket.socket:
        if peer == 2:
            raise TimeoutError("it does not come")
        made.append(socket.socket())
        return made[-1]

    monkeypatch.setattr(first._mesh, "connection", connection)
    monkeypatch.setattr(first, "_me", first._me._replace(world_size=4))
    with pytest.raises(ConnectionError, match="rank 0 could not connect"):
        first.connections()
    assert len(made) == 1 and made[0].fileno() < 0
    for bootstrap in (first, second):
        bootstrap.close()


def test_a_store_that_this_process_serves_is_used() -> None:
    """`torch.distributed.init_process_group` has opened it, before the engine."""
    from torch._C._distributed_c10d import TCPStore

    launch = Launch(2)
    opened = TCPStore("127.0.0.1", launch.port, is_master=True, wait_for_workers=False, multi_tenant=True)
    for bootstrap in launch.both():
        bootstrap.close()
    assert "file " in opened.get("inflight/attempt 0/engine 1/token").decode()


def test_a_port_in_use_is_named() -> None:
    launch = Launch(2)
    with (
        listen("127.0.0.1", launch.port),
        pytest.raises(
            ConfigError,
            match=rf"rank 0 cannot listen at MASTER_ADDR=127\.0\.0\.1, MASTER_PORT={launch.port}: .*a port that is free",
        ),
    ):
        launch.meet(0)


def test_another_machine_s_address_is_refused_at_rank_0() -> None:
    me = LaunchedRank(0, 2, "192.0.2.1", 29500, "0", agent_serves_store=False, local_ranks=range(2))
    with pytest.raises(ConfigError, match="choose an address of this machine"):
        LauncherBootstrap(me, 1.0)
