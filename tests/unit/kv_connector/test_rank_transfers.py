"""`RankTransfers` over arrays and tiers whose calls the test holds: what is copied when, and what an epoch ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inflight.kv_connector import rank_transfers
from inflight.kv_connector.rank_transfers import RankTransfers
from tests.support.waits import MOST_SECONDS, wait_until

NUM_BLOCKS, NUM_SLOTS, BLOCK_BYTES = 8, 16, 4


class HeldHostPool:
    """An array of slots. `on_read` is called before a row is read, with the number of the slot."""

    shape = (NUM_SLOTS, BLOCK_BYTES)

    def __init__(self) -> None:
        self.rows = np.zeros(self.shape, dtype=np.uint8)
        self.on_read: Callable[[int], None] = lambda slot: None

    def __getitem__(self, slot: int) -> np.ndarray[Any, Any]:
        self.on_read(slot)
        return self.rows[slot]

    def __setitem__(self, slot: int, row: np.ndarray[Any, Any]) -> None:
        self.rows[slot] = row


class HeldCopies:
    """Block n of the arena has the byte n everywhere, slots have 0. `before` is called in each copy with what is copied."""

    def __init__(self) -> None:
        self.arena = np.repeat(np.arange(NUM_BLOCKS, dtype=np.uint8)[:, None], BLOCK_BYTES, axis=1)
        self.host_pool: Any = HeldHostPool()
        self.before: Callable[[str], None] = lambda what: None
        self.entered: list[str] = []

    def enter_thread(self) -> None:
        self.entered.append(threading.current_thread().name)

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self.before("save")
        self.host_pool.rows[list(slots)] = self.arena[list(blocks)]

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self.before("load")
        self.arena[list(blocks)] = self.host_pool.rows[list(slots)]

    def slot(self, number: int) -> int:
        """The byte of a slot."""
        (byte,) = set(self.host_pool.rows[number].tolist())
        return int(byte)

    def block(self, number: int) -> int:
        (byte,) = set(self.arena[number].tolist())
        return int(byte)


class HeldTiers:
    """
    Attributes:
        contents: key -> its byte, and the number of the tier that has it.
        lengths: key -> the length of an object that is no block.
        calls: the arguments of each fetch.
        together: the keys of each store.
        stored: key, byte, and `stop` of each block that was stored.
        before: called in each call of a tier.
    """

    def __init__(self) -> None:
        self.contents: dict[bytes, tuple[int, int]] = {}
        self.lengths: dict[bytes, int] = {}
        self.asked: list[bytes] = []
        self.calls: list[tuple[list[bytes], list[int], bytes]] = []
        self.together: list[list[bytes]] = []
        self.stored: list[tuple[bytes, int, int | None]] = []
        self.before: Callable[[bytes], None] = lambda key: None
        self.num_closed = 0

    def fetch(
        self, keys: Sequence[bytes], places: Sequence[int] = (0,), last_key: bytes = b""
    ) -> list[tuple[memoryview, int] | None]:
        self.calls.append((list(keys), list(places), last_key))
        return [self._fetch(key) for key in keys]

    def _fetch(self, key: bytes) -> tuple[memoryview, int] | None:
        self.asked.append(key)
        self.before(key)
        if key not in self.contents:
            return None
        byte, number = self.contents[key]
        return memoryview(bytes([byte]) * self.lengths.get(key, BLOCK_BYTES)), number

    def store(self, keys: Sequence[bytes], payloads: Sequence[memoryview], stop: int | None = None) -> bool:
        self.together.append(list(keys))
        for key, payload in zip(keys, payloads, strict=True):
            self.before(key)
            (byte,) = set(bytes(payload))
            self.stored.append((key, byte, stop))
        return True

    def touch(self, keys: Sequence[bytes]) -> bool:
        self.asked += keys
        return self.contents.keys() >= set(keys)

    def take_counts(self) -> dict[str, dict[str, float]]:
        return {"fs": {"calls": float(len(self.asked) + len(self.stored))}}

    def close(self) -> None:
        self.num_closed += 1


class Gate:
    """Something that others wait for. It is opened at the end of the test, if the test has not opened it."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self._event = threading.Event()

    def __call__(self, *_: object) -> None:
        self.num_waiting += 1
        assert self._event.wait(MOST_SECONDS)

    def open(self) -> None:
        self._event.set()


@pytest.fixture
def copies() -> HeldCopies:
    return HeldCopies()


@pytest.fixture
def tiers() -> HeldTiers:
    return HeldTiers()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


@pytest.fixture
def transfers(copies: HeldCopies, tiers: HeldTiers, gate: Gate, request: pytest.FixtureRequest) -> Iterator[Any]:
    threads: dict[str, int] = getattr(request, "param", {})
    with pytest.MonkeyPatch.context() as patch:
        for name, number in threads.items():
            patch.setattr(rank_transfers, name, number)
        made = RankTransfers(copies, tiers)  # type: ignore[arg-type]
    yield made
    gate.open()
    made.close()


one_fetcher = pytest.mark.parametrize("transfers", [{"NUM_FETCH_THREADS": 1}], indirect=True)
two_fetchers = pytest.mark.parametrize("transfers", [{"NUM_FETCH_THREADS": 2}], indirect=True)
one_storer = pytest.mark.parametrize("transfers", [{"NUM_STORE_THREADS": 1}], indirect=True)


def get(future: Future[Any]) -> Any:
    return future.result(timeout=MOST_SECONDS)


def stores_ended(transfers: RankTransfers) -> None:
    """Returns when all stores that were submitted have ended. With one thread for them."""
    get(transfers._storers.submit(lambda: None))


# -- copies ------------------------------------------------------------------------------------------------------------


def test_a_save_copies_and_then_stores(transfers: RankTransfers, copies: HeldCopies, tiers: HeldTiers) -> None:
    saved = transfers.save(1, [3, 5], [9, 2], [[b"three"], [b"five"]])
    assert get(saved) is True
    assert (copies.slot(9), copies.slot(2)) == (3, 5)
    assert get(transfers.stored(1)) == (True, {"fs": {"calls": 2.0}})
    assert sorted(tiers.stored) == [(b"five", 5, None), (b"three", 3, None)]


def test_a_save_without_keys_stores_nothing(transfers: RankTransfers, copies: HeldCopies, tiers: HeldTiers) -> None:
    assert get(transfers.save(1, [3], [9], [])) is True
    assert (copies.slot(9), tiers.stored) == (3, [])
    assert get(transfers.stored(1)) == (False, {})


def test_without_tiers_blocks_are_saved_and_loaded(copies: HeldCopies) -> None:
    transfers = RankTransfers(copies, None)
    assert get(transfers.save(1, [3], [9], [])) is True
    assert get(transfers.load([9], [4], None)) is True
    assert copies.block(4) == 3
    assert copies.entered == ["inflight-kv-copy_0"]  # on a GPU it says which, before it copies
    transfers.begin_epoch()
    assert get(transfers.load([9], [5], None)) is True
    transfers.close()


class Step(Future[Any]):
    """A step that notes when somebody waits for its end."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = threading.Event()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.is_asked.set()
        return super().exception(timeout)


def test_a_load_waits_for_the_step_before_it(transfers: RankTransfers, copies: HeldCopies) -> None:
    step, order = Step(), list[str]()
    copies.before = order.append
    step.add_done_callback(lambda _: order.append("step"))
    loaded = transfers.load([9], [4], step)
    wait_until(lambda: step.is_asked.is_set() or loaded.done())
    step.set_result(None)
    assert get(loaded) is True
    assert order == ["step", "load"]
    assert copies.block(4) == 0


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_a_load_after_a_step_that_did_not_end_well_copies_nothing(
    transfers: RankTransfers, copies: HeldCopies, end: str
) -> None:
    """The step may not have left the device, so it may still read the blocks. `Worker.leave_epoch` cancels steps that wait for
    masks, and `begin_epoch` waits for the load."""
    step = Step()
    loaded = transfers.load([9], [4], step)
    wait_until(lambda: step.is_asked.is_set() or loaded.done())
    if end == "failed":
        step.set_exception(RuntimeError("a step"))
    else:
        step.cancel()
    assert get(loaded) is False
    assert copies.block(4) == 4


def test_a_copy_that_raises_is_an_answer_and_no_exception(
    transfers: RankTransfers, copies: HeldCopies, tiers: HeldTiers, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(what: str) -> None:
        raise RuntimeError(f"no {what}")

    copies.before = fail
    assert get(transfers.save(1, [3], [9], [[b"three"]])) is False
    assert get(transfers.load([9], [4], None)) is False
    assert get(transfers.stored(1))[0] is False
    assert tiers.stored == []
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["no save", "no load"]
    copies.before = lambda what: None
    assert get(transfers.load([9], [4], None)) is True  # the next copy is made


# -- fetches -----------------------------------------------------------------------------------------------------------


def test_a_fetch_fills_the_slots_of_the_keys_that_are_there(
    transfers: RankTransfers, copies: HeldCopies, tiers: HeldTiers
) -> None:
    tiers.contents = {b"a": (11, 0), b"b": (13, 0)}
    found, counts = get(transfers.fetch([b"a", b"b", b"c"], [4, 5, 6]))
    assert found == [True, True, False]
    assert [copies.slot(slot) for slot in (4, 5, 6)] == [11, 13, 0]
    assert counts == {"fs": {"calls": 3.0}}


@one_fetcher
def test_nothing_is_looked_for_after_a_missing_key(transfers: RankTransfers, tiers: HeldTiers) -> None:
    keys = [b"a", b"b", b"c", b"d"]
    tiers.contents = {key: (11, 0) for key in keys if key != b"b"}
    assert get(transfers.fetch(keys, [4, 5, 6, 7]))[0] == [True, False, False, False]
    assert tiers.asked == keys[:2]


@two_fetchers
def test_a_missing_key_does_not_end_the_keys_before_it(
    transfers: RankTransfers, copies: HeldCopies, tiers: HeldTiers, gate: Gate
) -> None:
    """One thread is slow with the first key, and the other one finds meanwhile that the second is missing."""
    tiers.contents = dict.fromkeys((b"a", b"c", b"d"), (11, 0))
    tiers.before = lambda key: gate() if key == b"a" else None
    fetched = transfers.fetch([b"a", b"b", b"c", b"d"], [4, 5, 6, 7])
    wait_until(lambda: transfers._fetchers._work_queue.empty() and b"b" in tiers.asked)
    gate.open()
    assert get(fetched)[0] == [True, False, False, False]
    assert sorted(tiers.asked) == [b"a", b"b"]


def test_an_object_of_another_length_is_no_block(
    transfers: RankTransfers, copies: HeldCopies, tiers: HeldTiers
) -> None:
    keys = [b"empty", b"one", b"short", b"long"]
    tiers.contents, tiers.lengths = dict.fromkeys(keys, (11, 1)), dict(zip(keys, [0, 1, 3, 5], strict=True))
    for each, slot in zip(keys, (4, 5, 6, 7), strict=True):
        assert get(transfers.fetch([each], [slot]))[0] == [False]
    assert [copies.slot(slot) for slot in (4, 5, 6, 7)] == [0] * 4
    assert tiers.stored == []


@one_fetcher
def test_a_hit_of_a_far_tier_is_stored_in_the_nearer_ones(transfers: RankTransfers, tiers: HeldTiers) -> None:
    tiers.contents = {b"near": (11, 0), b"far": (12, 2)}
    assert get(transfers.fetch([b"near", b"far"], [4, 5]))[0] == [True, True]
    get(transfers._fetchers.submit(lambda: None))
    assert tiers.stored == [(b"far", 12, 2)]


# -- epochs ------------------------------------------------------------------------------------------------------------


def test_a_fetch_of_an_older_epoch_does_not_write_to_the_host_pool(
    transfers: RankTransfers, copies: HeldCopies, tiers: HeldTiers, gate: Gate
) -> None:
    tiers.contents, tiers.before = {b"a": (11, 0)}, gate
    fetched = transfers.fetch([b"a"], [4])
    wait_until(lambda: gate.num_waiting)
    transfers.begin_epoch()
    copies.host_pool.rows[4] = 77  # the engine uses the slot again
    gate.open()
    assert get(fetched)[0] == [False]
    assert copies.slot(4) == 77


@one_fetcher
def test_a_fetch_of_an_older_epoch_asks_no_tier_any_more(
    transfers: RankTransfers, tiers: HeldTiers, gate: Gate
) -> None:
    """The threads are free for the fetches of the new epoch, although the tiers have all blocks."""
    tiers.contents, tiers.before = dict.fromkeys((b"a", b"b", b"c"), (11, 0)), gate
    fetched = transfers.fetch([b"a", b"b", b"c"], [4, 5, 6])
    wait_until(lambda: gate.num_waiting)
    transfers.begin_epoch()
    gate.open()
    assert get(fetched)[0] == [False] * 3
    assert tiers.asked == [b"a"]


@one_storer
def test_a_slot_that_was_used_again_is_not_stored_under_the_old_key(
    transfers: RankTransfers, copies: HeldCopies, tiers: HeldTiers, gate: Gate
) -> None:
    tiers.before = gate
    assert get(transfers.save(1, [3, 5], [9, 2], [[b"three"], [b"five"]])) is True
    wait_until(lambda: gate.num_waiting)
    transfers.begin_epoch()
    copies.host_pool.rows[:] = 77
    gate.open()
    stores_ended(transfers)
    assert tiers.stored == [(b"three", 3, None)]  # that one was copied before


@one_storer
def test_an_epoch_that_begins_while_a_slot_is_copied_for_a_store(
    transfers: RankTransfers, copies: HeldCopies, tiers: HeldTiers
) -> None:
    def begin(slot: int) -> None:
        transfers.begin_epoch()
        copies.host_pool.rows[slot] = 77

    copies.host_pool.on_read = begin
    assert get(transfers.save(1, [3], [9], [[b"three"]])) is True
    wait_until(lambda: transfers._epoch == 1)
    stores_ended(transfers)
    assert tiers.stored == []


def test_copies_have_ended_when_an_epoch_has_begun(transfers: RankTransfers, copies: HeldCopies, gate: Gate) -> None:
    """The one that runs is waited for; those behind it do nothing any more."""
    order = list[str]()

    def hold(what: str) -> None:
        gate()
        order.append(what)

    copies.before = hold
    running, behind = transfers.load([9], [4], None), transfers.load([9], [5], None)
    wait_until(lambda: gate.num_waiting)

    def begin() -> None:
        transfers.begin_epoch()
        order.append("epoch")

    beginning = threading.Thread(target=begin)
    beginning.start()
    wait_until(lambda: transfers._epoch == 1 and (transfers._copier._work_queue.qsize() == 2 or "epoch" in order))
    gate.open()
    beginning.join(MOST_SECONDS)
    assert (get(running), get(behind)) == (True, False)
    assert order == ["load", "epoch"]
    assert (copies.block(4), copies.block(5)) == (0, 5)


def test_the_stores_of_an_older_epoch_are_not_waited_for(
    transfers: RankTransfers, tiers: HeldTiers, gate: Gate
) -> None:
    tiers.before = gate
    get(transfers.save(1, [3], [9], [[b"three"]]))
    transfers.begin_epoch()
    stored = transfers.stored(1)
    assert stored.done()
    assert stored.result() == (False, {})


# -- limits and the end ------------------------------------------------------------------------------------------------


def test_too_many_blocks_that_wait_to_be_stored(
    transfers: RankTransfers, tiers: HeldTiers, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_transfers, "MAX_WAITING_STORES", 3)
    tiers.before = gate
    blocks, slots = [1, 2], [9, 10]
    assert get(transfers.save(1, blocks, slots, [[b"a"], [b"b"]])) is True
    assert get(transfers.save(2, blocks, slots, [[b"c"], [b"d"]])) is True  # it is in the host pool
    assert get(transfers.stored(2))[0] is False
    gate.open()
    assert get(transfers.stored(1))[0] is True
    assert get(transfers.save(3, blocks, slots, [[b"e"], [b"f"]])) is True
    assert get(transfers.stored(3))[0] is True
    assert sorted(key for key, _, _ in tiers.stored) == [b"a", b"b", b"e", b"f"]


class Clock:
    """In place of `time`. `sleep` lets time pass at once, and calls `on_sleep`."""

    def __init__(self, on_sleep: Callable[[], None] = lambda: None) -> None:
        self.now, self._on_sleep = 0.0, on_sleep
        self.as_module = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self._on_sleep()


def test_closing_waits_for_stores(
    transfers: RankTransfers, tiers: HeldTiers, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_stores() -> None:
        gate.open()
        wait_until(lambda: not transfers._num_waiting_stores)

    clock = Clock(end_stores)
    monkeypatch.setattr(rank_transfers, "time", clock.as_module)
    tiers.before = gate
    get(transfers.save(1, [3], [9], [[b"three"]]))
    transfers.close()
    assert (tiers.stored, tiers.num_closed) == ([(b"three", 3, None)], 1)
    assert clock.now < rank_transfers.MAX_CLOSING_SECONDS


def test_closing_does_not_wait_for_ever(
    transfers: RankTransfers, tiers: HeldTiers, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(rank_transfers, "time", clock.as_module)
    tiers.before = gate
    get(transfers.save(1, [3], [9], [[b"three"]]))
    start = time.monotonic()
    transfers.close()
    assert clock.now == pytest.approx(rank_transfers.MAX_CLOSING_SECONDS, abs=0.02)
    assert (tiers.stored, tiers.num_closed) == ([], 1)
    assert time.monotonic() - start < MOST_SECONDS  # it has not waited for the gate
    transfers.close()
    assert tiers.num_closed == 1


# -- chunks ------------------------------------------------------------------------------------------------------------


@one_storer
def test_the_blocks_of_a_chunk_are_stored_together(
    transfers: RankTransfers, copies: HeldCopies, tiers: HeldTiers
) -> None:
    keys = [[b"a"], [b"b", b"c", b"d"], [b"e"]]
    assert get(transfers.save(1, [1, 2, 3, 4, 5], [9, 8, 7, 6, 5], keys)) is True
    assert get(transfers.stored(1))[0] is True
    assert tiers.together == keys
    assert [(key, byte) for key, byte, _ in tiers.stored] == [(b"a", 1), (b"b", 2), (b"c", 3), (b"d", 4), (b"e", 5)]
    assert transfers._num_waiting_stores == 0


@one_fetcher
def test_the_blocks_of_a_chunk_are_fetched_together(
    transfers: RankTransfers, copies: HeldCopies, tiers: HeldTiers
) -> None:
    """Two chunks of two groups of layers, and a block in none."""
    keys = [b"a", b"A", b"b", b"B", b"c"]
    tiers.contents = {key: (i + 1, 0) for i, key in enumerate(keys)}
    chunks = [(b"b", 1), (b"B", 1), (b"b", 2), (b"B", 2), (b"", 0)]
    found, _ = get(transfers.fetch(keys, [4, 5, 6, 7, 8], chunks))
    assert found == [True] * 5
    assert tiers.calls == [([b"a", b"b"], [1, 2], b"b"), ([b"A", b"B"], [1, 2], b"B"), ([b"c"], [0], b"")]
    assert [copies.slot(slot) for slot in range(4, 9)] == [1, 2, 3, 4, 5]


@one_fetcher
def test_a_chunk_after_the_first_missing_block_is_not_looked_for(transfers: RankTransfers, tiers: HeldTiers) -> None:
    tiers.contents = {b"a": (1, 0), b"c": (3, 0), b"d": (4, 0)}
    chunks = [(b"b", 0), (b"b", 1), (b"d", 0), (b"d", 1)]
    assert get(transfers.fetch([b"a", b"b", b"c", b"d"], [4, 5, 6, 7], chunks))[0] == [True] + [False] * 3
    assert [keys for keys, _, _ in tiers.calls] == [[b"a", b"b"]]


@one_fetcher
def test_hits_of_a_chunk_are_copied_to_nearer_tiers_one_by_one(transfers: RankTransfers, tiers: HeldTiers) -> None:
    tiers.contents = {b"a": (1, 2), b"b": (2, 0), b"c": (3, 2)}
    chunks = [(b"c", 0), (b"c", 1), (b"c", 2)]
    assert all(get(transfers.fetch([b"a", b"b", b"c"], [4, 5, 6], chunks))[0])
    get(transfers._fetchers.submit(lambda: None))
    assert tiers.stored == [(b"a", 1, 2), (b"c", 3, 2)]


def test_tiers_are_told_of_the_first_block_last_and_get_again_what_they_lack(
    transfers: RankTransfers, copies: HeldCopies, tiers: HeldTiers
) -> None:
    tiers.contents = {b"a": (1, 0), b"c": (3, 0)}
    assert get(transfers.touch([[b"a"], [b"b"], [b"c"]]))[0] == [True, False, True]
    assert tiers.asked == [b"c", b"b", b"a"]
    copies.host_pool.rows[5] = 7
    copies.host_pool.rows[6] = 8
    assert get(transfers.restore([[b"b", b"d"]], [5, 6]))[0]
    assert tiers.stored == [(b"b", 7, None), (b"d", 8, None)] and tiers.together == [[b"b", b"d"]]
