"""`CacheGroup`: one KV group of full attention: a token sees all blocks before it. window_group.py has the other kinds."""

from collections.abc import Callable

from inflight.interface.kv_cache import KVCacheSpec
from inflight.kv_cache.block_pool import BlockKey, BlockPool
from inflight.kv_cache.request_blocks import RequestBlocks


class CacheGroup:
    """
    Args:
        index: the number of the group. It is a part of the names of the group's blocks.

    Attributes:
        is_whole: whether a token sees all blocks before it.
        has_states: whether a block holds a state of recurrent layers.
        num_needed: if a token does not see all blocks before it, how many of the last ones.
    """

    is_whole, has_states, num_needed = True, False, 0

    def __init__(self, index: int, spec: KVCacheSpec, pool: BlockPool) -> None:
        self._index, self._pool, self._block_size = index, pool, spec.block_size

    def first_live_block(self, num_computed_tokens: int) -> int:
        """Returns the first block that a token at position `num_computed_tokens` or later can see."""
        return 0

    def leave_window(self, blocks: RequestBlocks, table: list[int], num_computed_tokens: int) -> None:
        """Free the blocks of the group's `table` that no later token sees, now that so many tokens are computed. Blocks that
        were left behind after `blocks.num_committed` full blocks were freed then."""

    def is_kept(self, blocks: RequestBlocks, index: int, is_snapshot: bool) -> bool:
        """Whether another request is likely to need this block of a request."""
        return True

    def is_end(self, blocks: RequestBlocks, num_blocks: int) -> bool:
        """Whether what the next token needs after so many blocks of a request is kept."""
        return True

    def longest_hit(self, names: list[bytes], limit: int, find: Callable[[BlockKey], int | None]) -> int:
        """Returns the largest n <= limit for which a request with n cached blocks could continue: all blocks that
        the token at n * block_size sees in this group must be cached, which means that `find` finds them."""
        for i in range(limit):
            if find((names[i], self._index)) is None:
                return i
        return limit

    def needed_keys(self, names: list[bytes], num_blocks: int) -> list[BlockKey]:
        """Returns the names of the blocks that a request with `num_blocks` cached blocks needs."""
        return [self.key(name) for name in names[self.first_live_block(num_blocks * self._block_size) : num_blocks]]

    def cached_table(self, names: list[bytes], num_blocks: int) -> list[int]:
        """Returns a table with the cached blocks of these names. `longest_hit` has found them."""
        table: list[int] = []
        for key in self.needed_keys(names, num_blocks):
            block_id = self._pool.lookup(key)
            assert block_id is not None, key
            table.append(block_id)
        return table

    def shared_table(self, table: list[int], num_blocks: int) -> list[int] | None:
        """Returns the first `num_blocks` blocks of another request's table, for a request that continues after them. Returns
        None if a block that it needs was freed, because it is outside the other request's window."""
        return table[:num_blocks]

    def key(self, name: bytes) -> BlockKey:
        return name, self._index

    def name(self, block_id: int, name: bytes) -> None:
        """Other requests can find the block from now on."""
        self._pool.register(block_id, (name, self._index))
