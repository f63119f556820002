"""`ArcPool`: a `BlockPool` that evicts by ARC, the adaptive replacement cache of Megiddo and Modha (2003).

Cached blocks are in two lists: *once*, if their content was not used again since it came, and *again*. So prompts that never
come back do not displace those that come again and again. The names of evicted blocks are remembered for a while. When such a
content comes back, the list that it was in was too short. If that was *once*, `target` (the aimed length of *once*) grows. If
it was *again*, `target` shrinks.
"""

from collections import OrderedDict
from collections.abc import Sequence

from inflight.kv_cache.block_pool import BlockKey, BlockPool


class _CachedBlocks(OrderedDict[int, None]):
    """`lists`: the blocks that are not in `again`, and those that are; in both, the least recently used first. Whether a block
    is in `again` may change only while it is in use, because it is in no list then."""

    def __init__(self, again: set[int]) -> None:
        super().__init__()
        self._again = again
        self.lists = OrderedDict[int, None](), OrderedDict[int, None]()

    def __setitem__(self, block_id: int, value: None) -> None:
        super().__setitem__(block_id, value)
        self.lists[block_id in self._again][block_id] = None

    def __delitem__(self, block_id: int) -> None:
        super().__delitem__(block_id)
        del self.lists[block_id in self._again][block_id]

    def clear(self) -> None:
        super().clear()
        for each in self.lists:
            each.clear()


class ArcPool(BlockPool):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._again = set[int]()
        self._cached = self._arc = _CachedBlocks(self._again)
        self._evicted = OrderedDict[BlockKey, None](), OrderedDict[BlockKey, None]()  # from each list, the oldest first
        self._target = 0.0

    def refresh(self, block_ids: Sequence[int]) -> None:
        self.touch(block_ids)
        self._again.update(block_ids)
        self.free(reversed(block_ids))

    def register(self, block_id: int, key: BlockKey) -> None:
        is_new = key not in self._index
        super().register(block_id, key)
        if is_new:
            self._again.discard(block_id)
            for index, (mine, other) in enumerate((self._evicted, self._evicted[::-1])):
                if key in mine:
                    step = max(1.0, len(other) / len(mine)) * (1 if index == 0 else -1)
                    self._target = min(max(self._target + step, 0.0), self.num_blocks)
                    del mine[key]
                    self._again.add(block_id)

    def _victim(self) -> int:
        once, again = self._arc.lists
        index = 0 if once and (len(once) > self._target or not again) else 1
        block_id = next(iter(self._arc.lists[index]))
        key = self._keys[block_id]
        evicted = self._evicted[index]
        assert key is not None
        evicted[key] = None
        if len(evicted) > self.num_blocks:
            evicted.popitem(last=False)
        return block_id
