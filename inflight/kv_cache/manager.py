"""`KVCacheManager`: the block tables of requests, and the prefix cache, over one `BlockPool`.

Owns the pool and, through `RequestBlocks`, every table. Side effects, in the life of a request:

    1. `get_computed_blocks` finds the request's blocks in the prefix cache, or `share_prompt` finds its leader's blocks. No
       block changes.
    2. `allocate_slots` takes these blocks and new ones. If there are too few, it takes none.
    3. `commit`, after each step: full blocks get their names, so that other requests can find them from now on. Blocks that a
       sliding window has left are given back.
    4. `free` gives all other blocks back.

`reset_prefix_cache` empties the index. Requests that run at this moment keep their blocks. But `commit` puts none of their
later blocks in the index, because these depend on tokens from before the reset. The same holds for followers that share their
blocks. Blocks of requests that are admitted later are put in the index as usual.

All groups have one block size, so a request's tables are equally long. If a window has left a block, its entry is the dummy
block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from inflight.interface.kv_cache import DUMMY_BLOCK, KVCacheConfig
from inflight.interface.request import Int32Array
from inflight.kv_cache.block_hash import BlockHasher
from inflight.kv_cache.block_pool import BlockPool

NO_BLOCKS: tuple[list[int], ...] = ()


@dataclass(slots=True)
class RequestBlocks:
    """One request's tables (one per KV group, equally long), and the names of its full blocks."""

    tables: tuple[list[int], ...]
    root: bytes
    hashes: list[bytes] = field(default_factory=list)  # names of the first blocks, as far as they were needed
    num_committed: int = 0  # blocks [0, num_committed) are full, computed, and have been through `commit`
    may_be_named: bool = True  # False: the blocks depend on tokens from before `reset_prefix_cache`


class KVCacheManager:
    def __init__(self, config: KVCacheConfig, *, fingerprint: str, enable_prefix_caching: bool) -> None:
        self.block_size = config.groups[0].spec.block_size
        self._windows = [group.spec.sliding_window for group in config.groups]
        self._caching = enable_prefix_caching
        self._hasher = BlockHasher(fingerprint, self.block_size)
        self.pool = BlockPool(config.num_blocks)

    @property
    def num_groups(self) -> int:
        return len(self._windows)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, in [0, 1]."""
        usable = self.pool.num_blocks - 1
        return 1.0 - self.pool.num_free_blocks / usable

    def new_request(self, cache_salt: str) -> RequestBlocks:
        return RequestBlocks(tables=tuple([] for _ in self._windows), root=self._hasher.root(cache_salt))

    def get_computed_blocks(self, blocks: RequestBlocks, token_ids: Int32Array) -> tuple[list[int], ...]:
        """Returns the blocks of the longest cached beginning of `token_ids`, for each group. The last token is never part of
        it."""
        if not self._caching:
            return NO_BLOCKS
        blocks.may_be_named = True
        limit = (len(token_ids) - 1) // self.block_size
        self._hasher.extend(blocks.root, blocks.hashes, token_ids, limit)
        num_hit, previous = limit, -1
        while num_hit != previous:  # until all groups agree
            previous = num_hit
            for group in range(self.num_groups):
                num_hit = self._longest_hit(group, blocks.hashes, num_hit)
        return tuple(self._cached_table(group, blocks.hashes, num_hit) for group in range(self.num_groups))

    def share_prompt(self, blocks: RequestBlocks, leader: RequestBlocks, num_blocks: int) -> tuple[list[int], ...]:
        """Returns the leader's first blocks, for the request of `blocks`, which has the same prompt. NO_BLOCKS if the leader's
        window has left a block that this request needs."""
        tables = tuple(table[:num_blocks] for table in leader.tables)
        for group, table in enumerate(tables):
            if DUMMY_BLOCK in table[self._first_live_block(group, num_blocks * self.block_size) :]:
                return NO_BLOCKS
        blocks.may_be_named = leader.may_be_named
        return tables

    def allocate_slots(
        self, blocks: RequestBlocks, num_tokens: int, computed: tuple[list[int], ...] = NO_BLOCKS
    ) -> int | None:
        """Make the tables hold `num_tokens` tokens. If the tables are empty, `computed` becomes their beginning.

        Returns:
            how many entries were appended to each table. None if there are too few blocks; then nothing has changed.
        """
        needed = -(-num_tokens // self.block_size) - len(blocks.tables[0])
        if needed <= 0:
            return 0
        num_computed = len(computed[0]) if computed else 0
        num_new = (needed - num_computed) * self.num_groups
        revived = {block_id for table in computed for block_id in table if self.pool.is_free(block_id)}
        if num_new + len(revived) > self.pool.num_free_blocks:
            return None
        for table, shared in zip(blocks.tables, computed, strict=False):
            self.pool.touch(shared)
            table.extend(shared)
        for table in blocks.tables:
            table.extend(self.pool.allocate(needed - num_computed))
        return needed

    def has_full_blocks(self, blocks: RequestBlocks, num_computed_tokens: int) -> bool:
        """Whether `commit` has anything to do."""
        return num_computed_tokens // self.block_size > blocks.num_committed

    def commit(self, blocks: RequestBlocks, token_ids: Int32Array, num_computed_tokens: int) -> None:
        """Note that tokens `[0, num_computed_tokens)` are in the cache. Call it only if `has_full_blocks`."""
        num_full = num_computed_tokens // self.block_size
        is_named = self._caching and blocks.may_be_named
        if is_named:
            self._hasher.extend(blocks.root, blocks.hashes, token_ids, num_full)
        for group, table in enumerate(blocks.tables):
            if is_named:
                for i in range(blocks.num_committed, num_full):
                    if table[i] != DUMMY_BLOCK:
                        self.pool.register(table[i], (blocks.hashes[i], group))
            self._leave_window(group, table, num_computed_tokens)
        blocks.num_committed = num_full

    def free(self, blocks: RequestBlocks) -> None:
        """Give all blocks back, the last first, because the first ones can be shared and are to be evicted last. Idempotent."""
        for table in blocks.tables:
            self.pool.free(reversed(table))
            table.clear()
        blocks.num_committed = 0

    def reset_prefix_cache(self, running: Iterable[RequestBlocks]) -> None:
        """Forget all cached contents. `running`: the blocks of all requests that have any."""
        self.pool.forget_all()
        for blocks in running:
            blocks.may_be_named = False

    def check_integrity(self, live: list[RequestBlocks]) -> None:
        """Assert that the pool's counts are exactly what the live tables hold."""
        references: dict[int, int] = {}
        for blocks in live:
            assert len({len(table) for table in blocks.tables}) == 1
            for table in blocks.tables:
                for block_id in table:
                    if block_id != DUMMY_BLOCK:
                        references[block_id] = references.get(block_id, 0) + 1
        self.pool.check_integrity(references)

    def _first_live_block(self, group: int, num_computed_tokens: int) -> int:
        """Returns the first block that the token at position `num_computed_tokens`, or a later one, can see."""
        window = self._windows[group]
        return 0 if window is None else max(0, num_computed_tokens - window + 1) // self.block_size

    def _leave_window(self, group: int, table: list[int], num_computed_tokens: int) -> None:
        i = self._first_live_block(group, num_computed_tokens) - 1
        left = []
        while i >= 0 and table[i] != DUMMY_BLOCK:
            left.append(table[i])
            table[i] = DUMMY_BLOCK
            i -= 1
        self.pool.free(reversed(left))

    def _longest_hit(self, group: int, hashes: list[bytes], limit: int) -> int:
        """Returns the largest n <= limit such that all blocks that a token at n * block_size sees in this group are cached."""
        window = self._windows[group]
        if window is None:
            for i in range(limit):
                if self.pool.lookup((hashes[i], group)) is None:
                    return i
            return limit
        needed = -(-(window - 1) // self.block_size)
        run = 0
        for i in range(limit - 1, -1, -1):  # from the right: the first run that is long enough is the longest hit
            if run >= needed:
                return i + 1 + run
            run = run + 1 if self.pool.lookup((hashes[i], group)) is not None else 0
        return run

    def _cached_table(self, group: int, hashes: list[bytes], num_blocks: int) -> list[int]:
        first = self._first_live_block(group, num_blocks * self.block_size)
        table = [DUMMY_BLOCK] * first
        for i in range(first, num_blocks):
            block_id = self.pool.lookup((hashes[i], group))
            assert block_id is not None, (group, i)
            table.append(block_id)
        return table
