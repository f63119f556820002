"""`KVFetches`: which blocks of a prompt are fetched from the tiers to the host pool, and in which order.

What a tier has is not known: a fetch finds it out. So the blocks of full attention come first, in the order of the tokens, and
the first one that no tier has ends this. A request can go on from this place, if the tiers have what the other layers need
there: the last blocks of sliding windows, and a state of recurrent layers. If one of these is missing, earlier places are tried
at which they are kept (`KeptBlocks.ends`). So an object that is lost or damaged costs the tokens behind the last such
place, and not the whole prompt.
"""

import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from inflight.interface.statistics import TransferCounts
from inflight.interface.worker import TierCounts
from inflight.kv_cache.block_pool import BlockKey, BlockPool
from inflight.kv_cache.kept_blocks import KeptBlocks
from inflight.kv_cache.request_blocks import RequestBlocks
from inflight.scheduler.transfers import TransferCalls

# how many blocks of a sequence a fetch asks for: first 2, then twice as many each time, rounded up to whole chunks
FIRST_FETCH, LAST_FETCH = 2, 64
SMOOTHING = 0.3  # weight of the newest measurement

Waiting = Generator[Future[Any], list[Any], bool]


class FetchOwner(Protocol):
    """`KVTransfers`, as fetches see it."""

    host_pool: BlockPool

    @property
    def num_resets(self) -> int: ...

    @property
    def ended_at(self) -> float:
        """The time at which the call ended for which the transfer was waiting."""

    @property
    def counts(self) -> TransferCounts: ...

    def find_near(self, key: BlockKey) -> int | None:
        """Returns None if neither arena nor host pool has the block. Otherwise the number has no meaning."""

    def wire_keys(self, keys: Sequence[BlockKey]) -> list[bytes]: ...

    def record_fetched(self, keys: Sequence[BlockKey]) -> None: ...

    def end_of_another(self) -> Future[Any]:
        """Returns a future that ends when the load or the fetch of another transfer has ended."""

    def wake_others(self) -> None: ...


class KVFetches:
    """
    Args:
        blocks_per_chunk: a tier may store so many blocks of full attention as one object.

    Attributes:
        block_seconds: how long a block takes; 0 if it is not known.
        running: the keys of the blocks that are being fetched.
    """

    def __init__(self, kept: KeptBlocks, calls: TransferCalls, owner: FetchOwner, blocks_per_chunk: int) -> None:
        self._kept, self._calls, self._owner, self._per_chunk = kept, calls, owner, blocks_per_chunk
        self.block_seconds = 0.0
        self.running = set[BlockKey]()

    def fetch(self, blocks: RequestBlocks, limit: int, first: int) -> Generator[Future[Any], list[Any], None]:
        """A transfer: fetch what a request needs that goes on after at most `limit` blocks. The first `first` ones are near."""
        num_resets = self._owner.num_resets
        end = yield from self._fetch_whole(blocks, limit, first)
        if end < limit:
            blocks.num_before_last_state = end  # whoever computes the rest keeps there what others need
        for place in self._kept.ends(blocks, end):
            if num_resets != self._owner.num_resets or place <= first or (yield from self._fetch_last(blocks, place)):
                return

    def _fetch_whole(self, blocks: RequestBlocks, limit: int, first: int) -> Generator[Future[Any], list[Any], int]:
        """Fetch the blocks that all later tokens need. Returns how many of the first `limit` blocks are near now."""
        size = FIRST_FETCH
        while first < limit:
            end = first + size
            indices = range(first, min(end + -end % self._per_chunk, limit))  # no chunk is read in two parts
            wanted = [(key, i) for i in indices for key in self._kept.whole_keys(blocks, i)]
            if not (yield from self._bring(blocks, wanted)):
                is_near = self._owner.find_near
                return next((i for key, i in wanted if is_near(key) is None), indices.stop)
            first, size = indices.stop, min(2 * size, LAST_FETCH)
        return limit

    def _fetch_last(self, blocks: RequestBlocks, place: int) -> Waiting:
        """Fetch the last blocks before this place, the last ones first. Returns whether all are near now."""
        needed, size = [(key, place - 1) for key in self._kept.needed_keys(blocks, place)], FIRST_FETCH
        while needed:
            if not (yield from self._bring(blocks, needed[-size:])):
                return False
            del needed[-size:]
            size = min(2 * size, LAST_FETCH)
        return True

    def _bring(self, blocks: RequestBlocks, keys: Sequence[tuple[BlockKey, int]]) -> Waiting:
        """Fetch those of the blocks that are not near. Each one comes with its number in the sequence. Returns whether all are
        near now. They are not fetched if the host pool has too little room."""
        owner = self._owner
        while wanted := [each for each in keys if owner.find_near(each[0]) is None]:
            names = [key for key, _ in wanted]
            if self.running.isdisjoint(names):
                return (yield from self._call(blocks, names, [index for _, index in wanted]))
            yield owner.end_of_another()  # which fetches them for a request with the same prefix
        return True

    def _call(self, blocks: RequestBlocks, keys: list[BlockKey], indices: list[int]) -> Waiting:
        owner = self._owner
        host_pool, num_resets, start = owner.host_pool, owner.num_resets, time.monotonic()
        if len(keys) > host_pool.num_free_blocks // 2:
            return False
        slots = host_pool.allocate(len(keys))
        chunks = [self._chunk_of(blocks, *each) for each in zip(keys, indices, strict=True)]
        self.running.update(keys)
        try:
            answers: list[tuple[list[bool], TierCounts]] = yield self._calls.fetch(
                owner.wire_keys(keys), slots, chunks if self._per_chunk > 1 else []
            )
            found = [all(has) for has in zip(*(answer[0] for answer in answers), strict=True)]
            owner.counts.add_tiers(answer[1] for answer in answers)
            if num_resets != owner.num_resets:
                return False
            for key, slot, has in zip(keys, slots, found, strict=True):
                if has:
                    host_pool.register(slot, key)
            owner.record_fetched([key for key, has in zip(keys, found, strict=True) if has])
        finally:
            host_pool.free(reversed(slots))
            self.running.difference_update(keys)
            owner.wake_others()
        owner.counts.num_fetched_blocks += sum(found)
        count = len(set(indices))
        if any(found) and count > 1:  # several blocks are fetched at a time: one alone would seem slow
            self.block_seconds = smooth(self.block_seconds, (owner.ended_at - start) / count)
        return all(found)

    def _chunk_of(self, blocks: RequestBlocks, key: BlockKey, index: int) -> tuple[bytes, int]:
        """Returns the key of the last block of this block's chunk, and the number of the block in the chunk; b"" and 0 if the
        group has no chunks, or if the key is not known."""
        number = index % self._per_chunk
        last = index - number + self._per_chunk - 1
        if last >= len(blocks.hashes) or not self._kept.is_whole(key):
            return b"", 0
        return self._owner.wire_keys([(blocks.hashes[last], key[1])])[0], number


def smooth(old: float, new: float) -> float:
    """Returns the mean of measurements, in which the newer ones count more. 0: nothing was measured."""
    return new if not old else (1 - SMOOTHING) * old + SMOOTHING * new
