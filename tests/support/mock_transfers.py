"""`MockTransfers`: the calls for transfers of one mock rank, ended in a random order, late, and with faults.

It keeps to what `RankTransfers` promises and to nothing else. A copy happens at any time between its call and its end: each one
draws whether it happens first or last. A load begins when the newest step before it has run. What a tier gives is verified, so
a torn, damaged, swapped or foreign object is a missing one. The host pool's and the tiers' contents are the arena's rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from inflight.errors import RankError

if TYPE_CHECKING:
    from tests.support.mock_engine import LateExecutor

Row = np.ndarray[Any, Any]
Object = list[tuple[bytes, Row]]  # one block, or those of a chunk, each with its key


@dataclass
class _Call:
    future: Future[Any]
    end: Callable[[], Any]  # returns the value of the rank
    after: Future[Any] | None = None  # the step that must have run before

    @property
    def may_end(self) -> bool:
        return self.after is None or self.after.done()


LENGTHS = range(2, 9)  # of chunks


def _name(last: bytes, length: int) -> bytes:
    return last if length == 1 else last + b"%d" % length


class MockTransfers:
    """
    Args:
        tiers: wire key -> contents; a chunk has the key of its last block and its length. Engines may share it.
        fault_rate: how often a copy fails, or an object is damaged or lost.
        slowness: the probability that nothing ends in a turn.

    Attributes:
        num_faults: how many were injected.
    """

    def __init__(
        self, rng: random.Random, tiers: dict[bytes, Object], *, fault_rate: float = 0.0, slowness: float = 0.3
    ) -> None:
        self._rng, self._tiers, self._fault_rate, self._slowness = rng, tiers, fault_rate, slowness
        self._host_pool: dict[int, Row] = {}
        self._calls: list[_Call] = []
        self._saves: dict[int, tuple[list[list[bytes]], list[int]]] = {}
        self.num_faults = 0
        self.log: list[str] = []

    def call(self, executor: LateExecutor, action: str, *args: Any) -> Future[Any]:
        self.log.append(action)
        future: Future[Any] = Future()
        self._calls.append(getattr(self, f"_{action}")(executor, future, *args))
        return future

    def advance(self, *, is_needed: bool = False) -> None:
        """End some calls. `is_needed`: nothing else can happen, so that at least one ends."""
        while ready := [call for call in self._calls if call.may_end]:
            if not is_needed and self._rng.random() < self._slowness:
                return
            is_needed = False
            self._end(self._rng.choice(ready))

    def finish(self) -> None:
        while self._calls:
            self._end(self._calls[0])

    def begin_epoch(self, cause: RankError, *, loses_host_pool: bool) -> None:
        """The calls under way fail. Their copies have happened, or never will."""
        calls, self._calls = self._calls, []
        self._saves.clear()
        for call in calls:
            if call.may_end and self._rng.random() < 0.5:
                call.end()
            call.future.set_exception(type(cause)("dropped", rank=0))
        if loses_host_pool:
            self._host_pool.clear()

    def _end(self, call: _Call) -> None:
        self._calls.remove(call)
        call.future.set_result([call.end()])

    def _is_faulty(self) -> bool:
        is_faulty = self._rng.random() < self._fault_rate
        self.num_faults += is_faulty
        return is_faulty

    def _once(self, copy: Callable[[], Any]) -> Callable[[], Any]:
        """`copy` now, or when the call ends."""
        if self._rng.random() < 0.5:
            value = copy()
            return lambda: value
        return copy

    def _save(
        self,
        executor: LateExecutor,
        future: Future[Any],
        number: int,
        blocks: Sequence[int],
        slots: Sequence[int],
        keys: list[list[bytes]],
    ) -> _Call:
        assert len(set(slots)) == len(slots) and 0 not in slots and 0 not in blocks
        assert not keys or sum(map(len, keys)) == len(slots)
        self._saves[number] = keys, list(slots)

        def copy() -> bool:
            count = len(blocks)
            if is_faulty := self._is_faulty():  # some were copied
                count = self._rng.randrange(count)
                self._saves[number] = [], []
            for block, slot in list(zip(blocks, slots, strict=True))[:count]:
                self._host_pool[slot] = executor.worker._cache[block].copy()
            return not is_faulty

        return _Call(future, self._once(copy))

    def _stored(self, executor: LateExecutor, future: Future[Any], number: int) -> _Call:
        keys, slots = self._saves.pop(number, ([], []))  # none: it was of an older epoch

        def store() -> tuple[bool, dict[str, dict[str, float]]]:
            rest = iter(slots)
            for together in keys:
                rows = [(key, self._host_pool[next(rest)].copy()) for key in together]
                if not self._is_faulty():
                    name = _name(together[-1], len(together))
                    same = zip(rows, self._tiers.get(name, rows), strict=True)
                    assert all(new[0] == old[0] and np.array_equal(new[1], old[1]) for new, old in same), "two contents"
                    self._tiers[name] = rows
            return True, {"fs": {"stored": float(len(slots))}}

        return _Call(future, store)

    def _touch(self, executor: LateExecutor, future: Future[Any], keys: list[list[bytes]]) -> _Call:
        def touch() -> tuple[list[bool], dict[str, dict[str, float]]]:
            stored = {key for blocks in self._tiers.values() for key, _ in blocks}
            return [stored.issuperset(together) for together in keys], {}

        return _Call(future, touch)

    def _restore(self, executor: LateExecutor, future: Future[Any], keys: list[list[bytes]], slots: list[int]) -> _Call:
        assert sum(map(len, keys)) == len(slots)

        def store() -> tuple[bool, dict[str, dict[str, float]]]:
            rest = iter(slots)
            for together in keys:
                rows = [(key, self._host_pool[next(rest)].copy()) for key in together]
                if not self._is_faulty():
                    self._tiers.setdefault(_name(together[-1], len(together)), rows)
            return True, {}

        return _Call(future, store)

    def _fetch(
        self,
        executor: LateExecutor,
        future: Future[Any],
        keys: list[bytes],
        slots: list[int],
        chunks: list[tuple[bytes, int]],
    ) -> _Call:
        assert keys and len(set(slots)) == len(slots) and len(chunks) in (0, len(keys))

        def copy() -> tuple[list[bool], dict[str, dict[str, float]]]:
            found = [False] * len(keys)
            for i, (key, slot) in enumerate(zip(keys, slots, strict=True)):
                chunk, number = chunks[i] if chunks else (b"", 0)
                places = [(_name(chunk, length), number) for length in LENGTHS if chunk] + [(key, 0)]
                rows = [row for name, place in places if (row := self._find(key, name, place)) is not None]
                if rows:
                    self._host_pool[slot] = rows[0].copy()
                    found[i] = True
                else:
                    break
            return found, {"fs": {"hits": float(sum(found))}}

        return _Call(future, self._once(copy))

    def _find(self, key: bytes, name: bytes, number: int) -> Row | None:
        """The block with this number in an object. Each block in it has its key, so no block is taken for another."""
        if name in self._tiers and self._is_faulty():
            self._tiers.pop(name)  # it was damaged, and removed
        blocks = self._tiers.get(name, [])[number : number + 1]
        return next((row for found, row in blocks if found == key), None)

    def _load(self, executor: LateExecutor, future: Future[Any], slots: list[int], blocks: list[int]) -> _Call:
        assert len(set(blocks)) == len(blocks)

        def copy() -> bool:
            if self._is_faulty():
                for block in blocks[: self._rng.randrange(len(blocks) + 1)]:
                    executor.worker._cache[block] = -3
                return False
            for slot, block in zip(slots, blocks, strict=True):
                executor.worker._cache[block] = self._host_pool[slot]
            return True

        after = executor.newest
        return _Call(future, self._once(copy) if after is None else copy, after)
