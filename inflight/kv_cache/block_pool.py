"""`BlockPool`: which KV blocks are in use, which are free, and what the cached blocks contain.

It owns the reference counts, the lists of free blocks, and the index: a map from the name of a content to the block that holds
it. The name is a hash of the tokens (block_hash.py). Every block is in one of these states:

    in use       reference count > 0; if it is in the index, other requests can share it
    empty        count 0, was allocated before, is not in the index
    untouched    count 0, was never allocated; on a CPU its bytes take no memory yet
    cached       count 0, is in the index: `lookup` finds it until its content is evicted

`allocate` first uses empty blocks (the block that was freed last comes first, because its bytes are still in the processor's
cache), then untouched blocks in the order of their ids. If there are no more of these, it evicts cached blocks: here the least
recently used one (in `ArcPool` another). The cost of each block is O(1). Block 0, the *dummy block*, is never given out. In
block tables it replaces blocks that a request does not need any more.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from inflight.interface.kv_cache import DUMMY_BLOCK

BlockKey = tuple[bytes, int]  # (name of the content, KV group)


class BlockPool:
    """
    Attributes:
        watchers: called with a key and True when the key joins the index, and with the key and False when it leaves the index.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.watchers: list[Callable[[BlockKey, bool], None]] = []
        self._ref_counts = [0] * num_blocks
        self._ref_counts[DUMMY_BLOCK] = 1
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._index: dict[BlockKey, int] = {}
        self._empty: list[int] = []
        self._first_untouched = DUMMY_BLOCK + 1  # blocks [first_untouched, num_blocks) are untouched
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free_blocks(self) -> int:
        """How many blocks `allocate` can give out, including cached ones."""
        return len(self._empty) + self.num_blocks - self._first_untouched + len(self._cached)

    def describe(self) -> str:
        """Returns text for an error dump."""
        return f"{self.num_free_blocks} of {self.num_blocks - 1} KV blocks are free"

    def allocate(self, count: int) -> list[int]:
        """Returns `count` blocks, which are now in use. The caller must check `num_free_blocks` first."""
        assert count <= self.num_free_blocks, (count, self.num_free_blocks)
        block_ids = [self._take() for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def _take(self) -> int:
        if self._empty:
            return self._empty.pop()
        if self._first_untouched < self.num_blocks:
            self._first_untouched += 1
            return self._first_untouched - 1
        block_id = self._victim()
        del self._cached[block_id]
        self._forget(block_id)
        return block_id

    def _victim(self) -> int:
        """Chooses the cached block that is evicted."""
        return next(iter(self._cached))

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block but the dummy block. So a cached block becomes a block in use."""
        counts = self._ref_counts
        for block_id in block_ids:
            if block_id != DUMMY_BLOCK:
                if not counts[block_id]:
                    del self._cached[block_id]
                counts[block_id] += 1

    def free(self, block_ids: Iterable[int], *, early: bool = False) -> None:
        """Remove a reference from each block but the dummy block. The first of `block_ids` will be evicted first. With `early`
        they will be evicted before all other blocks, the last one first."""
        counts = self._ref_counts
        for block_id in block_ids:
            if block_id == DUMMY_BLOCK:
                continue
            assert counts[block_id] > 0, block_id
            counts[block_id] -= 1
            if not counts[block_id]:
                if self._keys[block_id] is None:
                    self._empty.append(block_id)
                else:
                    self._cached[block_id] = None
                    if early:
                        self._cached.move_to_end(block_id, last=False)

    def refresh(self, block_ids: Sequence[int]) -> None:
        """Note that the contents of these blocks are used again. The first of `block_ids` will be evicted last."""
        self.touch(block_ids)
        self.free(reversed(block_ids))

    def count_free(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks are free."""
        counts = self._ref_counts
        return [counts[block_id] for block_id in block_ids].count(0)

    def lookup(self, key: BlockKey) -> int | None:
        return self._index.get(key)

    def cached_keys(self) -> list[BlockKey]:
        return list(self._index)

    def register(self, block_id: int, key: BlockKey) -> None:
        """Add a block to the index. It must be in use. If another block already has this name, nothing changes."""
        assert self._ref_counts[block_id] > 0 and self._keys[block_id] in (None, key), block_id
        if key not in self._index:
            self._index[key] = block_id
            self._keys[block_id] = key
            for watch in self.watchers:
                watch(key, True)

    def forget_all(self) -> None:
        """Remove all blocks from the index. Blocks in use stay in use; cached blocks become empty."""
        for block_id in list(self._index.values()):
            self._forget(block_id)
        self._empty += self._cached
        self._cached.clear()

    def _forget(self, block_id: int) -> None:
        key = self._keys[block_id]
        if key is not None:
            del self._index[key]
            self._keys[block_id] = None
            for watch in self.watchers:
                watch(key, False)

    def check_integrity(self, references: dict[int, int]) -> None:
        """Assert every invariant. `references`: block id -> how many block tables contain it."""
        empty = set(self._empty)
        assert len(empty) == len(self._empty)
        for block_id in range(self.num_blocks):
            expected = 1 if block_id == DUMMY_BLOCK else references.get(block_id, 0)
            assert self._ref_counts[block_id] == expected, (block_id, self._ref_counts[block_id], expected)
            key = self._keys[block_id]
            is_free, is_untouched = expected == 0, block_id >= self._first_untouched
            assert is_free or not is_untouched, block_id
            assert (block_id in empty) == (is_free and not is_untouched and key is None), block_id
            assert (block_id in self._cached) == (is_free and key is not None), block_id
            assert key is None or self._index[key] == block_id, block_id
        assert len(self._index) == sum(key is not None for key in self._keys)
        assert DUMMY_BLOCK not in references
