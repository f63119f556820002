"""`CacheGroup`: one KV group. It knows which blocks of a table its tokens still need, and which cached prefix it can continue.

When a block is outside the sliding window, it is freed, and its entry in the table becomes the dummy block (block 0, which no
request gets). In a group of recurrent layers a block holds a state, and the window is 2: a token needs only one state.
"""

from collections.abc import Callable

from inflight.interface.kv_cache import DUMMY_BLOCK, KVCacheSpec
from inflight.kv_cache.block_pool import BlockKey, BlockPool


class CacheGroup:
    """
    Args:
        index: the number of the group. It is a part of the names of the group's blocks.
    """

    def __init__(self, index: int, spec: KVCacheSpec, pool: BlockPool) -> None:
        self.has_states = spec.is_state
        self._index, self._pool = index, pool
        self._block_size, self._window = spec.block_size, spec.sliding_window
        self.is_whole = spec.sliding_window is None  # a token sees all blocks before it

    def first_live_block(self, num_computed_tokens: int) -> int:
        """Returns the first block that a token at position `num_computed_tokens` or later can see."""
        return 0 if self._window is None else max(0, num_computed_tokens - self._window + 1) // self._block_size

    def leave_window(self, table: list[int], num_committed: int, num_computed_tokens: int) -> None:
        """Free the blocks that are outside the window now. Blocks before the window that there was after `num_committed` full
        blocks were freed then."""
        first = self.first_live_block(num_committed * self._block_size)
        stop = self.first_live_block(num_computed_tokens)
        self._pool.free(table[first:stop])
        table[first:stop] = [DUMMY_BLOCK] * max(0, stop - first)

    def longest_hit(self, names: list[bytes], limit: int, find: Callable[[BlockKey], int | None]) -> int:
        """Returns the largest n <= limit for which a request with n cached blocks could continue: all blocks that
        the token at n * block_size sees in this group must be cached, which means that `find` finds them."""
        if self._window is None:
            for i in range(limit):
                if find((names[i], self._index)) is None:
                    return i
            return limit
        needed = -(-(self._window - 1) // self._block_size)
        run = 0
        # from the right: the first long enough run of cached blocks is the longest hit
        for i in range(limit - 1, -1, -1):
            if run >= needed:
                return i + 1 + run
            run = run + 1 if find((names[i], self._index)) is not None else 0
        return run

    def needed_keys(self, names: list[bytes], num_blocks: int) -> list[BlockKey]:
        """Returns the names of the blocks that a request with `num_blocks` cached blocks needs."""
        return [self.key(name) for name in names[self.first_live_block(num_blocks * self._block_size) : num_blocks]]

    def cached_table(self, names: list[bytes], num_blocks: int) -> list[int]:
        """Returns a table with the cached blocks of these names. `longest_hit` has found them."""
        first = self.first_live_block(num_blocks * self._block_size)
        table = [DUMMY_BLOCK] * first
        for i in range(first, num_blocks):
            block_id = self._pool.lookup((names[i], self._index))
            assert block_id is not None, (self._index, i)
            table.append(block_id)
        return table

    def shared_table(self, table: list[int], num_blocks: int) -> list[int] | None:
        """Returns the first `num_blocks` blocks of another request's table, for a request that continues after them. Returns
        None if a block that it needs was freed, because it is outside the other request's window."""
        first = self.first_live_block(num_blocks * self._block_size)
        live = table[first:num_blocks]
        return None if DUMMY_BLOCK in live else [DUMMY_BLOCK] * first + live

    def key(self, name: bytes) -> BlockKey:
        return name, self._index

    def name(self, block_id: int, name: bytes) -> None:
        """Other requests can find the block from now on."""
        self._pool.register(block_id, (name, self._index))
