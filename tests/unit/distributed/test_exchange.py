"""`Exchange` between ranks that are threads: bytes of any size, and what ends the waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from inflight.distributed.exchange import Exchange
from inflight.errors import LostPeerError, SilentPeerError
from tests.support.descriptors import num_descriptors
from tests.unit.distributed.test_collectives import at_once, exchanges

Make = Callable[..., list[Exchange]]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Exchange] = []

    def make(size: int, timeout_seconds: float = 30.0) -> list[Exchange]:
        found = exchanges(size, timeout_seconds)
        for exchange in found:
            exchange.ranks = range(10, 10 + size)  # their global numbers
        made.extend(found)
        return found

    yield make
    for exchange in made:
        exchange.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as threads:
        yield threads


def receive(exchange: Exchange, *peers: int) -> None:
    """Wait for one byte of each peer."""
    exchange.swap({}, {peer: memoryview(bytearray(1)) for peer in peers})


def waiting(pool: ThreadPoolExecutor, exchange: Exchange, *peers: int) -> Future[None]:
    """A thread that waits for these peers."""
    future = pool.submit(receive, exchange, *peers)
    end = time.monotonic() + 300
    while not exchange.is_waiting:
        assert time.monotonic() < end and not future.done()
    return future


def test_bytes_of_any_size_reach_their_rank(make: Make) -> None:
    """Each pair of ranks exchanges another number of bytes: none, a few, and more than fit into the buffers of a socket."""
    sizes = {(0, 1): 0, (1, 0): 3_000_000, (0, 2): 5_000_000, (2, 0): 5, (1, 2): 1, (2, 1): 70_000}

    def data(sender: int, receiver: int) -> bytes:
        return bytes([10 * sender + receiver]) * sizes[sender, receiver]

    def work(exchange: Exchange) -> None:
        own, peers = exchange.rank, [rank for rank in range(3) if rank != exchange.rank]
        for _ in range(2):
            received = {peer: bytearray(sizes[peer, own]) for peer in peers}
            views = {peer: memoryview(each) for peer, each in received.items()}
            exchange.swap({peer: data(own, peer) for peer in peers}, views)
            assert received == {peer: data(peer, own) for peer in peers}
        assert not exchange.is_waiting

    at_once(make(3), work)


def test_records_are_in_the_order_of_the_ranks(make: Make) -> None:
    found = at_once(make(3), lambda exchange: exchange.swap_records(b"of %d" % exchange.rank))
    assert found == [[b"of 0", b"of 1", b"of 2"]] * 3


def test_a_rank_that_leaves_ends_a_wait_for_another_rank(make: Make, pool: ThreadPoolExecutor) -> None:
    """That rank may itself wait for the lost one. Here it does nothing at all."""
    first, second, third = make(3)
    wait = waiting(pool, second, 0)
    third.close()
    with pytest.raises(LostPeerError, match="lost rank 12: ") as caught:
        wait.result(300)
    assert caught.value.ranks == (12,)
    assert not second.is_waiting
    with pytest.raises(ConnectionError, match="lost rank 12"):
        receive(second, 0)  # the reason is still the first one
    with pytest.raises(LostPeerError, match=r"lost rank 1[12]"):
        receive(first, 1, 2)


def test_an_error_of_one_rank_is_known_to_the_others(make: Make, pool: ThreadPoolExecutor) -> None:
    """The first rank waits too long. Its connections are shut down, so the second rank does not wait at all."""
    first, second = make(2, timeout_seconds=0.05)
    with pytest.raises(SilentPeerError, match=r"ranks 11 were silent for 0\.05 s") as caught:
        receive(first, 1)
    assert caught.value.ranks == (11,)
    second.timeout_seconds = 60.0
    with pytest.raises(LostPeerError, match="lost rank 10"):
        receive(second, 0)
    with pytest.raises(ConnectionError, match="silent"):
        receive(first, 1)


def test_close_ends_the_waits_of_this_rank(make: Make, pool: ThreadPoolExecutor) -> None:
    first, second = make(2)
    wait = waiting(pool, first, 1)
    first.close()
    with pytest.raises(ConnectionError, match="this rank has stopped its communication"):
        wait.result(300)
    first.close()
    with pytest.raises(ConnectionError, match="this rank has stopped its communication"):
        receive(first, 1)
    with pytest.raises(LostPeerError):
        receive(second, 0)
    second.close()
    with pytest.raises(ConnectionError, match="lost rank 10"):  # not that it has stopped: that came later
        receive(second, 0)


def test_close_frees_the_connections() -> None:
    before = num_descriptors()
    for exchange in exchanges(3):
        exchange.close()
    assert num_descriptors() == before


def test_one_host_means_that_all_ranks_have_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    found = exchanges(3)
    assert all(exchange.is_one_host for exchange in found)
    others = exchanges(3, host="127.0.0.2")
    mixed = Exchange(3, 0, {1: found[0]._connections[1], 2: others[0]._connections[2]}, 1.0)
    assert not mixed.is_one_host
    for exchange in (*found, *others):
        exchange.close()
