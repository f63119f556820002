"""`BlockPool`: all blocks of one rank's arena, by id.

Owns reference counts, the free queue and the index of cached contents. A block is in exactly one state:

    in use       reference count > 0; it may be in the index too, then others can share it
    cached, free count 0, in the index and in the queue; found by `lookup`, or evicted when its turn comes
    free         count 0, in the queue, without content

The queue is taken from the front. A freed block without content goes to the front (its bytes are warm and nobody can want
them); one with content goes to the back, so contents leave in the order of their last use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from inflight.interface.kv_cache import DUMMY_BLOCK

BlockKey = tuple[bytes, int]  # (digest of the chain, KV group)


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._ref_counts[DUMMY_BLOCK] = 1
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._index: dict[BlockKey, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(i for i in range(num_blocks) if i != DUMMY_BLOCK)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` could give out, cached contents included."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, evicting the contents least recently used. The caller has checked `num_free_blocks`."""
        assert count <= len(self._free), (count, len(self._free))
        block_ids = []
        for _ in range(count):
            block_id, _unused = self._free.popitem(last=False)
            self._forget(block_id)
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each; a cached free block comes back into use. The dummy block is passed over."""
        for block_id in block_ids:
            if block_id == DUMMY_BLOCK:
                continue
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop a reference of each, in the order in which they should be evicted. The dummy block is passed over."""
        for block_id in block_ids:
            if block_id == DUMMY_BLOCK:
                continue
            assert self._ref_counts[block_id] > 0, block_id
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if self._keys[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def is_free(self, block_id: int) -> bool:
        return self._ref_counts[block_id] == 0

    def lookup(self, key: BlockKey) -> int | None:
        return self._index.get(key)

    def register(self, block_id: int, key: BlockKey) -> None:
        """Give a block in use its content's name. When another block has it already, that one keeps it."""
        assert self._ref_counts[block_id] > 0 and self._keys[block_id] in (None, key), block_id
        if key not in self._index:
            self._index[key] = block_id
            self._keys[block_id] = key

    def forget_all(self) -> None:
        """Empty the index; blocks in use stay in use."""
        for block_id in list(self._index.values()):
            self._forget(block_id)

    def _forget(self, block_id: int) -> None:
        key = self._keys[block_id]
        if key is not None:
            del self._index[key]
            self._keys[block_id] = None

    def check_integrity(self, references: dict[int, int]) -> None:
        """Assert every invariant. `references`: block id -> how many tables hold it."""
        for block_id in range(self.num_blocks):
            expected = 1 if block_id == DUMMY_BLOCK else references.get(block_id, 0)
            assert self._ref_counts[block_id] == expected, (block_id, self._ref_counts[block_id], expected)
            assert (block_id in self._free) == (expected == 0), block_id
            key = self._keys[block_id]
            assert key is None or self._index[key] == block_id, block_id
        assert len(self._index) == sum(key is not None for key in self._keys)
        assert DUMMY_BLOCK not in references
