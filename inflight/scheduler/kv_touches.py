"""`KVTouches`: tells the tiers which blocks are used, although the arena or the host pool has them.

A tier drops what was not used for the longest time. But it sees no use of a block that the engine finds near. So the beginnings
that all prompts share would seem to be the oldest, and be dropped first. A block is *recorded* when it is saved or fetched. If
it is found near later, the tiers are told, at most once in a while. What they have dropped all the same is stored again.
"""

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any

from inflight.config.kv_transfer import KVTransferConfig
from inflight.kv_cache.block_pool import BlockKey, BlockPool
from inflight.scheduler.kv_fetches import FetchOwner
from inflight.scheduler.transfers import TransferCalls

TOUCH_SECONDS = (
    10.0  # the tiers are told of a block after so long, or after a quarter of the time for which it keeps an object
)
SAVED_SHARE = (
    4  # or when as many blocks were saved since as 1/4 of the arena has: a small tier drops blocks in less time
)
MEMORY = 4  # so many times the blocks of arena and host pool are recorded


class KVTouches:
    """
    Args:
        pool: the blocks of the arena.
        calls: calls the ranks.
        owner: has the host pool, the keys of blocks in the tiers, and the counts.
        save: saves blocks of the arena in the host pool and the tiers, soon, as one object.
    """

    def __init__(
        self,
        config: KVTransferConfig,
        pool: BlockPool,
        calls: TransferCalls,
        owner: FetchOwner,
        save: Callable[[list[BlockKey]], None],
    ) -> None:
        self._pool, self._host_pool, self._calls, self._owner, self._save = pool, owner.host_pool, calls, owner, save
        self._has_tiers, self._saves = bool(config.tiers), config.saves
        self._seconds = min([TOUCH_SECONDS, *(tier.ttl_seconds / 4 for tier in config.tiers if tier.ttl_seconds)])
        self._num_recorded = 0
        # key -> when it was recorded or told: the time, and `_num_recorded`; the oldest first
        self._last: dict[BlockKey, tuple[float, int]] = {}

    def note(self, keys: Sequence[BlockKey]) -> None:
        """The tiers have just got these blocks."""
        if self._has_tiers:
            self._num_recorded += len(keys)
            self._set(keys)

    def record_fetched(self, keys: Sequence[BlockKey]) -> None:
        """A tier has given these blocks. The others do not know it: they are told when they are due."""
        self._num_recorded += len(keys)
        self._set([key for key in keys if key not in self._last])

    def due(self, objects: Sequence[list[BlockKey]]) -> list[list[BlockKey]]:
        """Returns those of the objects, whose blocks were found, of which the tiers must be told now. They count as told."""
        if not self._last:
            return []
        since = time.monotonic() - self._seconds
        num_recorded = self._num_recorded - self._pool.num_blocks // SAVED_SHARE
        due = [
            keys
            for keys in objects
            if (last := self._last.get(keys[0])) is not None and (last[0] <= since or last[1] <= num_recorded)
        ]
        self._set([key for keys in due for key in keys])
        return due

    def tell(self, objects: Sequence[list[BlockKey]]) -> Generator[Future[Any], list[Any], None]:
        """A transfer (`KVTransfers`) that tells the tiers that these objects are used."""
        wire_keys, lookup = self._owner.wire_keys, self._host_pool.lookup
        answers = yield self._calls.touch([wire_keys(keys) for keys in objects])
        self._owner.counts.add_tiers(answer[1] for answer in answers)
        has = [all(each) for each in zip(*(answer[0] for answer in answers), strict=True)]
        lost = [keys for keys, is_there in zip(objects, has, strict=True) if not is_there]
        if not self._saves:
            return
        kept, slots, room = list[list[BlockKey]](), list[int](), self._host_pool.num_free_blocks // 2
        for keys in lost:
            near = [slot for key in keys if (slot := lookup(key)) is not None]
            if len(near) < len(keys):
                self._save([key for key in keys if lookup(key) is None])
            elif len(slots) + len(near) <= room:
                kept.append(keys)
                slots += near
        if not kept:
            return
        self._host_pool.touch(slots)
        try:
            answers = yield self._calls.restore([wire_keys(keys) for keys in kept], slots)
            self._owner.counts.add_tiers(answer[1] for answer in answers)
        finally:
            self._host_pool.free(reversed(slots))

    def _set(self, keys: Sequence[BlockKey]) -> None:
        now = time.monotonic(), self._num_recorded
        for key in keys:
            self._last.pop(key, None)
            self._last[key] = now
        while len(self._last) > MEMORY * (self._pool.num_blocks + self._host_pool.num_blocks):
            del self._last[next(iter(self._last))]
