"""How ranks find a store, and each other through it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, Store

from benchmarks.shared.free_port import free_port
from inflight.distributed.socket_channel import SocketMesh
from inflight.distributed.store import ask, meet_store, open_mesh, reach_store
from inflight.interface.worker import TOKEN_BYTES
from inflight.sockets import listen

TOKEN = bytes(range(TOKEN_BYTES))
HOST = "127.0.0.1"


@pytest.fixture
def meshes() -> Iterator[list[SocketMesh]]:
    """Of four ranks."""
    with contextlib.ExitStack() as stack:
        made: list[SocketMesh] = []
        for rank in range(4):
            mesh = SocketMesh(rank, listen(HOST, 0), TOKEN, lambda peer: made[peer].address, 300.0)
            stack.callback(mesh.close)
            made.append(mesh)
        yield made


@pytest.mark.parametrize("ranks", [(0, 2, 3), (1, 2), (3,)])
def test_some_ranks_meet_at_a_store_of_their_own(meshes: list[SocketMesh], ranks: tuple[int, ...]) -> None:
    with ThreadPoolExecutor(4) as pool:
        meeting = [pool.submit(meet_store, meshes[rank], rank, ranks, "group", HOST, 300.0) for rank in ranks]
        stores = [each.result(300) for each in meeting]
    for rank, store in zip(ranks, stores, strict=True):
        store.set(f"from {rank}", str(rank))
    for store in stores:
        assert [ask(store, f"from {rank}") for rank in ranks] == [str(rank) for rank in ranks]


def test_two_groups_of_the_same_ranks_have_two_stores(meshes: list[SocketMesh]) -> None:
    def meet(rank: int) -> list[Store]:
        return [meet_store(meshes[rank], rank, (0, 1), name, HOST, 300.0) for name in ("a", "b")]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(meet, (0, 1))
    for store, name in zip(first, "ab", strict=True):
        store.set("name", name)
    assert [ask(store, "name") for store in second] == ["a", "b"]


@pytest.mark.parametrize("sent", [b"", b"\x01\x02"])
def test_a_first_rank_that_leaves_is_told(meshes: list[SocketMesh], sent: bytes) -> None:
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(meet_store, meshes[2], 2, (1, 2), "group", HOST, 300.0)
        with meshes[1].connection(2, "store of group") as connection:
            connection.sendall(sent)
        with pytest.raises(ConnectionError, match="rank 1 has left before rank 2"):
            meeting.result(300)


def test_a_store_that_is_not_there_is_named() -> None:
    with pytest.raises(ConnectionError, match="rank 1 cannot reach rank 0 at the head"):
        reach_store(HOST, free_port(), 0.2, asked="rank 1 cannot reach rank 0", where="the head")


def test_a_key_that_nobody_writes_is_named() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(ConnectionError, match="'address 7'"):
        ask(store, "address 7")


def test_ranks_find_each_others_listeners_through_a_store() -> None:
    store = HashStore()
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as opened:
        meshes = [open_mesh(store, rank, HOST, TOKEN, 300.0) for rank in range(3)]
        for rank, mesh in enumerate(meshes):
            opened.callback(mesh.close)
            host, port = mesh.address
            assert host == HOST and ask(store, f"address {rank}") == f"{HOST} {port}"
        assert TOKEN not in b"".join(store.get(f"address {rank}") for rank in range(3))
        accepted = pool.submit(meshes[2].connection, 1, "a")
        with meshes[1].connection(2, "a") as theirs, accepted.result(300) as ours:
            theirs.sendall(b"from 1")
            assert ours.recv(6) == b"from 1"
