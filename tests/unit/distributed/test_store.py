"""Stores in which ranks meet: the first of some ranks serves one, and tells the others its address."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from torch.distributed import HashStore, Store

from inflight.distributed.socket_channel import SocketMesh
from inflight.distributed.store import ask, meet_store, open_mesh, reach_store
from inflight.interface.worker import TOKEN_BYTES

HOST, TOKEN = "127.0.0.1", bytes(TOKEN_BYTES)


@pytest.fixture
def meshes() -> Iterator[list[SocketMesh]]:
    """Of three ranks, which find each other's listeners in a store of this process."""
    store = HashStore()
    with ExitStack() as opened:
        made = [open_mesh(store, rank, HOST, TOKEN, 300.0) for rank in range(3)]
        for mesh in made:
            opened.callback(mesh.close)
        yield made


@pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2), (0, 2)])
def test_the_first_rank_serves_the_store(meshes: list[SocketMesh], ranks: tuple[int, ...]) -> None:
    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(lambda rank: meet_store(meshes[rank], rank, ranks, "pair", HOST, 300.0), ranks)
    first.set("key", "value")
    assert [ask(store, "key") for store in (first, *others)] == ["value"] * len(ranks)


def test_each_name_has_its_own_store(meshes: list[SocketMesh]) -> None:
    def meet(rank: int) -> list[Store]:
        return [meet_store(meshes[rank], rank, (0, 1), name, HOST, 300.0) for name in ("a", "b")]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(meet, (0, 1))
    for store, value in zip(first, "ab", strict=True):
        store.set("key", value)
    assert [ask(store, "key") for store in second] == ["a", "b"]


def test_a_first_rank_that_leaves_before_it_tells_the_address(meshes: list[SocketMesh]) -> None:
    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(meet_store, meshes[2], 2, (1, 2), "pair", HOST, 300.0)
        with meshes[1].connection(2, "store of pair"):
            pass
        with pytest.raises(ConnectionError, match="rank 1 has left before rank 2 got the address of its store"):
            met.result(300)


def test_a_store_that_cannot_be_reached() -> None:
    with pytest.raises(ConnectionError):
        reach_store(HOST, 1, 0.1, asked="rank 1 cannot reach rank 0", where="the head")
