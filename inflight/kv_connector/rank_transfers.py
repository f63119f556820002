"""`RankTransfers`: copies KV blocks of one rank between its arena, its host pool and its tiers.

    arena  <-- load --  host pool  <-- fetch --  tiers
    arena  -- save -->  host pool  -- store -->  tiers

The arena has the blocks of the prefix cache and of running requests. The host pool is host memory with room for more blocks,
one in each *slot*. The tiers (tier_stack.py) are files or servers, which may be slow, dead or wrong. So only a copy within this
machine writes to the arena, and only verified bytes get from a tier into the host pool. The engine decides which blocks and
slots are used for what (scheduler/kv_transfers.py), and all ranks use the same numbers.

One thread copies between arena and host pool, in the order of the calls. Some threads fetch, and copy hits of a far tier to
nearer tiers. Others store saved blocks, so a fetch does not wait for saves. After a fault the ranks begin a new epoch, and
the engine may use any slot and block again. So `begin_epoch` waits for the copies between arena and host pool, and no fetch
that began before it writes to the host pool afterwards.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from inflight.interface.worker import TierCounts
from inflight.kv_connector.tier_stack import TierStack

if TYPE_CHECKING:
    from inflight.device.block_copies import BlockCopies  # loads torch

logger = logging.getLogger(__name__)

NUM_FETCH_THREADS = 4
NUM_STORE_THREADS = 2
MAX_WAITING_STORES = 4096  # blocks; more are not stored in the tiers
MAX_CLOSING_SECONDS = 2.0  # how long `close` waits for the last blocks to be stored


class RankTransfers:
    """The rank's thread calls the methods. Only `begin_epoch` and `close` wait.

    If a transfer fails, its future has a result that says so, and no exception. An exception would reach the engine before the
    other ranks have ended the transfer, and blocks must not be used again while a rank copies.
    """

    def __init__(self, copies: "BlockCopies", tiers: TierStack | None) -> None:
        self._copies = copies
        self._tiers = tiers
        self._copier = ThreadPoolExecutor(1, "inflight-kv-copy", initializer=copies.enter_thread)
        self._fetchers = ThreadPoolExecutor(NUM_FETCH_THREADS, "inflight-kv-fetch")
        self._storers = ThreadPoolExecutor(NUM_STORE_THREADS, "inflight-kv-store")
        self._lock = threading.Lock()  # for the next two, and for writes of fetches to the host pool
        self._epoch = 0
        self._num_waiting_stores = 0
        self._stored: dict[int, Future[tuple[bool, TierCounts]]] = {}  # id of a save -> the end of its stores

    def save(
        self, transfer_id: int, blocks: Sequence[int], slots: Sequence[int], keys: Sequence[Sequence[bytes]]
    ) -> Future[bool]:
        """Copy blocks of the arena to slots. If `keys` are given, store the blocks in the tiers after that. Each element of
        `keys` has the key of one block, or those of all blocks of a chunk. The future says whether the copies have succeeded;
        the future of `stored` ends with the stores."""
        epoch = self._epoch
        ended = Future[tuple[bool, TierCounts]]()
        if keys:
            self._stored[transfer_id] = ended

        def copy() -> bool:
            is_saved = self._copy(lambda: self._copies.save(blocks, slots), epoch)
            if keys:
                self._store(keys if is_saved else (), slots, epoch, ended)
            return is_saved

        return self._copier.submit(copy)

    def stored(self, transfer_id: int) -> Future[tuple[bool, TierCounts]]:
        """The future ends when the blocks of this save are stored, or given up. It says whether the tiers were asked to store
        them, and what the tiers have done since they were last counted."""
        stored = self._stored.pop(transfer_id, None)
        if stored is None:  # an epoch has begun since
            stored = Future()
            stored.set_result((False, {}))
        return stored

    def load(self, slots: Sequence[int], blocks: Sequence[int], after: Future[Any] | None) -> Future[bool]:
        """Copy slots to blocks of the arena when the step `after` has ended: it and older steps may still use the blocks.
        The future says whether the copies have succeeded."""
        epoch = self._epoch

        def copy() -> bool:
            try:
                if after is not None and after.exception() is not None:
                    return False
            except CancelledError:
                return False
            return self._copy(lambda: self._copies.load(slots, blocks), epoch)

        return self._copier.submit(copy)

    def _copy(self, copy: Callable[[], None], epoch: int) -> bool:
        if epoch != self._epoch:
            return False
        try:
            copy()
        except Exception:
            logger.exception("KV blocks could not be copied")
            return False
        return True

    def fetch(
        self, keys: Sequence[bytes], slots: Sequence[int], chunks: Sequence[tuple[bytes, int]] = ()
    ) -> Future[tuple[list[bool], TierCounts]]:
        """Copy blocks from the tiers to slots. If no tier has a key, later keys are not looked for.
        `chunks` are given if a tier has chunks: for each block the key of the last block of its chunk, and the block's number
        in the chunk; b"" and 0 if it is in no chunk, or if the key is not known. The future says of each key whether its slot
        has the block now, and what the tiers have done since they were last counted."""
        tiers = self._tiers
        epoch = self._epoch
        future = Future[tuple[list[bool], TierCounts]]()
        assert tiers is not None
        found = [False] * len(keys)
        num_ended = itertools.count(1)
        end = len(keys)
        chunks, parts = chunks or [(b"", 0)] * len(keys), dict[bytes, list[int]]()
        for i, (last_key, _) in enumerate(chunks):
            parts.setdefault(last_key or keys[i], []).append(i)

        def fetch_part(part: list[int]) -> None:
            nonlocal end
            last_key = chunks[part[0]][0]
            places = [chunks[i][1] for i in part]
            is_wanted = part[0] < end and epoch == self._epoch
            all_got = tiers.fetch([keys[i] for i in part], places, last_key) if is_wanted else [None] * len(part)
            good: list[tuple[int, memoryview, int]] = []
            for i, got in zip(part, all_got, strict=True):
                with self._lock:
                    # a writer to the tier who can make checksums can make another length, too
                    if got is not None and len(got[0]) == self._copies.host_pool.shape[1]:
                        good.append((i, *got))
                        if epoch == self._epoch:
                            self._copies.host_pool[slots[i]] = np.frombuffer(got[0], dtype=np.uint8)
                            found[i] = True
                    else:
                        end = min(end, i)
            if next(num_ended) == len(parts):
                future.set_result((found, tiers.take_counts()))
            for i, payload, number in good:
                if number > 0:  # a hit in a far tier is copied to the near ones
                    tiers.store([keys[i]], [payload], number)

        for part in parts.values():
            self._fetchers.submit(fetch_part, part)
        return future

    def touch(self, keys: Sequence[Sequence[bytes]]) -> Future[tuple[list[bool], TierCounts]]:
        """Tell the tiers that these objects are used. Each element of `keys` is as in `save`. The future says of each one
        whether the tiers have it, as far as they can tell, and what the tiers have done since they were last counted."""
        tiers = self._tiers
        ended = Future[tuple[list[bool], TierCounts]]()
        assert tiers is not None

        def touch() -> None:
            has = [tiers.touch(each) for each in reversed(keys)]  # the first block is used last, so it is dropped last
            ended.set_result((has[::-1], tiers.take_counts()))

        self._storers.submit(touch)
        return ended

    def restore(self, keys: Sequence[Sequence[bytes]], slots: Sequence[int]) -> Future[tuple[bool, TierCounts]]:
        """Store objects of blocks of the host pool in those tiers that lack them. The future ends like that of `stored`."""
        ended = Future[tuple[bool, TierCounts]]()
        self._store(keys, slots, self._epoch, ended)
        return ended

    def _store(
        self, keys: Sequence[Sequence[bytes]], slots: Sequence[int], epoch: int, ended: Future[tuple[bool, TierCounts]]
    ) -> None:
        tiers = self._tiers
        num_ended = itertools.count(1)
        assert tiers is not None
        with self._lock:
            has_room = self._num_waiting_stores + len(slots) <= MAX_WAITING_STORES
            self._num_waiting_stores += len(slots) if keys and has_room else 0
        if not keys or not has_room:
            ended.set_result((False, tiers.take_counts()))
            return

        def store_object(object_keys: Sequence[bytes], first: int) -> None:
            end = first + len(object_keys)
            payloads = [memoryview(self._copies.host_pool[slot].copy()) for slot in slots[first:end]]
            if epoch == self._epoch:  # then the slots still had these blocks when they were copied
                tiers.store(object_keys, payloads)
            with self._lock:
                self._num_waiting_stores -= len(object_keys)
            if next(num_ended) == len(keys):
                ended.set_result((True, tiers.take_counts()))

        firsts = itertools.accumulate(map(len, keys), initial=0)  # one more than there are objects
        for object_keys, first in zip(keys, firsts, strict=False):
            self._storers.submit(store_object, object_keys, first)

    def begin_epoch(self) -> None:
        """No transfer that began before this call writes to arena or host pool after it. Call it when all steps have ended
        or were
        cancelled: a load waits for a step."""
        with self._lock:
            self._epoch += 1
            self._stored.clear()
        self._copier.submit(lambda: None).result()

    def close(self) -> None:
        """Wait for copies, and at most MAX_CLOSING_SECONDS for stores, and close the tiers. Idempotent."""
        end = time.monotonic() + MAX_CLOSING_SECONDS
        self._copier.shutdown(wait=True)
        while self._num_waiting_stores and time.monotonic() < end:
            time.sleep(0.01)
        for pool in (self._fetchers, self._storers):
            pool.shutdown(wait=False, cancel_futures=True)
        tiers, self._tiers = self._tiers, None
        if tiers is not None:
            tiers.close()
