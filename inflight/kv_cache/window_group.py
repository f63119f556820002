"""`WindowGroup`: a KV group of layers with a sliding window, or of recurrent layers. A token sees the last blocks before it.

When a block is outside the window, it is freed, and its entry in the table becomes the dummy block (block 0, which no request
gets). In a group of recurrent layers a block holds a state, and the window is 2: a token needs only one state.

Only a prompt that parts from this one just behind a block can use the block after the window has left it. So this block is
evicted before all others, unless prompts are known to part there, or may do so: before `num_shared` (partings.py), and at the
end of the prompt, where the next message of a chat goes on if its template leaves the reasoning out. Otherwise the blocks that
windows have left behind would evict those from which chats go on. One window in KEPT_SHARE is kept, too: if a later block is
lost or damaged, or if a long prompt parts from others for the first time, not all of it is computed.
"""

from collections.abc import Callable

from inflight.interface.kv_cache import DUMMY_BLOCK, KVCacheConfig, KVCacheSpec
from inflight.kv_cache.block_pool import BlockKey, BlockPool
from inflight.kv_cache.groups import CacheGroup
from inflight.kv_cache.request_blocks import RequestBlocks

KEPT_SHARE = 8


class WindowGroup(CacheGroup):
    is_whole = False

    def __init__(self, index: int, spec: KVCacheSpec, window: int, pool: BlockPool) -> None:
        super().__init__(index, spec, pool)
        self.has_states = spec.is_state
        self._window = window
        self.num_needed = -(-(window - 1) // spec.block_size)  # the blocks before a token that it sees
        self._distance = KEPT_SHARE * max(1, self.num_needed)  # between the ends of windows that are kept in any case

    def first_live_block(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self._window + 1) // self._block_size

    def leave_window(self, blocks: RequestBlocks, table: list[int], num_computed_tokens: int) -> None:
        first = self.first_live_block(blocks.num_committed * self._block_size)
        stop = self.first_live_block(num_computed_tokens)
        kept = [i for i in range(first, stop) if self.is_kept(blocks, i, self.has_states)]
        self._pool.free(table[i] for i in kept)
        self._pool.free((table[i] for i in range(first, stop) if i not in kept), early=True)
        table[first:stop] = [DUMMY_BLOCK] * max(0, stop - first)

    def is_kept(self, blocks: RequestBlocks, index: int, is_snapshot: bool) -> bool:
        if self.has_states:
            return is_snapshot
        next_regular = (index // self._distance + 1) * self._distance
        return any(end - self.num_needed <= index < end for end in (*_special_ends(blocks), next_regular))

    def is_end(self, blocks: RequestBlocks, num_blocks: int) -> bool:
        return num_blocks % self._distance == 0 or num_blocks in _special_ends(blocks)

    def longest_hit(self, names: list[bytes], limit: int, find: Callable[[BlockKey], int | None]) -> int:
        run = 0
        # from the right: the first long enough run of cached blocks is the longest hit
        for i in range(limit - 1, -1, -1):
            if run >= self.num_needed:
                return i + 1 + run
            run = run + 1 if find((names[i], self._index)) is not None else 0
        return run

    def cached_table(self, names: list[bytes], num_blocks: int) -> list[int]:
        live = super().cached_table(names, num_blocks)
        return [DUMMY_BLOCK] * (num_blocks - len(live)) + live

    def shared_table(self, table: list[int], num_blocks: int) -> list[int] | None:
        first = self.first_live_block(num_blocks * self._block_size)
        live = table[first:num_blocks]
        return None if DUMMY_BLOCK in live else [DUMMY_BLOCK] * first + live


def _special_ends(blocks: RequestBlocks) -> tuple[int, int, int]:
    return blocks.num_shared, blocks.num_prompt_blocks, blocks.num_before_last_state


def make_groups(config: KVCacheConfig, pool: BlockPool) -> list[CacheGroup]:
    windows = [group.spec.sliding_window for group in config.groups]
    return [
        CacheGroup(index, group.spec, pool) if window is None else WindowGroup(index, group.spec, window, pool)
        for index, (group, window) in enumerate(zip(config.groups, windows, strict=True))
    ]
