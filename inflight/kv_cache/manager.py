"""`KVCacheManager`: owns the block tables of requests and the prefix cache. Both use the blocks of one `BlockPool`.

It owns the pool and, in `RequestBlocks`, every block table. What happens in the life of a request:

    1. `get_computed_blocks` finds blocks of the request's tokens in the prefix cache, or `share_prompt` finds blocks of its
       leader (the request that computes the same prompt, with n > 1). No block changes.
    2. `allocate_slots` gives the request these blocks and new ones. If too few blocks are free, it gives none.
    3. `commit` is called after each step. It names each full block by the hash of its content. From now on other requests
       can find the block. `commit` also frees blocks that are outside the sliding window now.
    4. `free` frees all other blocks.

`reset_prefix_cache` removes all names. Requests that run at this moment keep their blocks. `commit` will not name their later
blocks, because these blocks depend on tokens that were computed before the reset. The same is true for followers (requests that
share blocks of a leader) of these requests. All other requests that are admitted after the reset are not affected.

All KV groups (groups.py) have the same block size, so all tables of a request have the same length.

In a group of recurrent layers, a block holds a state. A step reads the state of the block before its first token. It writes the
state after its last token to the block of this token, and snapshots (the state after earlier tokens) to the other blocks that
`allocate_slots` has given the request for this step. There is a snapshot after the last full block of the prompt, and about one
in `checkpoint_tokens` tokens. Only snapshots are named, so a cached prefix ends at a snapshot. When a request ends or is
preempted, the state after its last full block becomes a snapshot, too (`name_last_state`): the next message of a chat goes on
from there.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from inflight.interface.kv_cache import DUMMY_BLOCK, KVCacheConfig
from inflight.interface.parts import RequestPart, contents_of
from inflight.interface.request import Int32Array
from inflight.kv_cache.block_events import BlockEvents
from inflight.kv_cache.block_hash import BlockHasher
from inflight.kv_cache.block_pool import BlockKey, BlockPool
from inflight.kv_cache.cached_names import CachedNames
from inflight.kv_cache.partings import make_partings
from inflight.kv_cache.request_blocks import RequestBlocks
from inflight.kv_cache.window_group import make_groups

NO_BLOCKS: tuple[list[int], ...] = ()
_NO_REFERENCES: Mapping[int, int] = MappingProxyType({})


class KVCacheManager:
    """
    Args:
        checkpoint_tokens: before each multiple of this number, the last full block has a snapshot of recurrent layers.
    """

    def __init__(
        self, config: KVCacheConfig, *, fingerprint: str, enable_prefix_caching: bool, checkpoint_tokens: int = 512
    ) -> None:
        self.block_size = config.groups[0].spec.block_size
        self._checkpoint_tokens = checkpoint_tokens
        self._num_ahead_tokens = config.num_ahead_tokens
        self._caching = enable_prefix_caching
        self._hasher = BlockHasher(fingerprint, self.block_size)
        self.pool = BlockPool(config.num_blocks)
        self._events: BlockEvents | None = None
        self.groups = make_groups(config, self.pool)
        self._partings = make_partings(self.groups, self.pool)

    def watch_names(self) -> CachedNames:
        """Returns an object that notes which names of blocks join and leave the prefix cache. Of several KV groups it watches
        the first one of full attention, because a request needs all of its blocks."""
        whole = [index for index, group in enumerate(self.groups) if group.is_whole]
        return CachedNames(self.pool, whole[0] if whole else 0)

    def watch_blocks(self) -> BlockEvents:
        """Like `watch_names`, but the object also notes the tokens of the blocks."""
        self._events = BlockEvents(self.watch_names(), self.block_size, self._hasher.root("").name)
        return self._events

    def record_loaded(self, blocks: RequestBlocks, num_blocks: int, token_ids: Int32Array) -> None:
        """The first blocks of a request were loaded, and have joined the prefix cache."""
        if self._events is not None:
            self._events.record_stored(blocks, 0, num_blocks, token_ids)

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, in [0, 1]."""
        usable = self.pool.num_blocks - 1
        return 1.0 - self.pool.num_free_blocks / usable

    def new_request(
        self, cache_salt: str, num_prompt_tokens: int = 0, parts: Sequence[RequestPart] = ()
    ) -> RequestBlocks:
        root = self._hasher.root(cache_salt, contents_of(parts) if parts else ())
        num_prompt_blocks = max(0, num_prompt_tokens - 1) // self.block_size
        return RequestBlocks(tuple([] for _ in self.groups), root, num_prompt_blocks)

    def num_tokens_of(self, computed: tuple[list[int], ...]) -> int:
        """How many tokens the blocks `computed` have, for example those of `get_computed_blocks`."""
        return len(computed[0]) * self.block_size if computed else 0

    def get_computed_blocks(self, blocks: RequestBlocks, token_ids: Int32Array) -> tuple[list[int], ...]:
        """Returns for each group the blocks of the longest cached prefix of `token_ids`. It never includes the last token,
        because the last token must be computed to draw the next one."""
        if not self._caching:
            return NO_BLOCKS
        blocks.may_be_named = True
        limit = self.name_blocks(blocks, token_ids)
        if self._partings is not None:
            self._partings.note(blocks, limit)
        num_hit = self.longest_hit(blocks, limit, self.pool.lookup)
        return tuple(group.cached_table(blocks.hashes, num_hit) for group in self.groups)

    def name_blocks(self, blocks: RequestBlocks, token_ids: Int32Array) -> int:
        """Compute the names of the full blocks of `token_ids`. Returns how many blocks are full without the last token."""
        self._hasher.extend(blocks.root, blocks.hashes, token_ids, len(token_ids) // self.block_size)
        return (len(token_ids) - 1) // self.block_size

    def longest_hit(self, blocks: RequestBlocks, limit: int, find: Callable[[BlockKey], int | None]) -> int:
        """Returns the largest n <= limit for which `find` finds all blocks that a request with n cached blocks needs."""
        num_hit, previous = limit, -1
        while num_hit != previous:  # until all groups have the same number of cached blocks
            previous = num_hit
            for group in self.groups:
                num_hit = group.longest_hit(blocks.hashes, num_hit, find)
        return num_hit

    def share_prompt(self, blocks: RequestBlocks, leader: RequestBlocks, num_blocks: int) -> tuple[list[int], ...]:
        """Returns the leader's first blocks for the request of `blocks`, which has the same prompt. Returns NO_BLOCKS
        if this request needs a block that the leader has freed, because it is outside the leader's sliding window. The names of
        the shared blocks are not computed again."""
        tables = []
        for group, table in zip(self.groups, leader.tables, strict=True):
            if (shared := group.shared_table(table, num_blocks)) is None:
                return NO_BLOCKS
            tables.append(shared)
        blocks.may_be_named = leader.may_be_named
        blocks.hashes = blocks.hashes or leader.hashes[:num_blocks]
        return tuple(tables)

    def allocate_slots(
        self, blocks: RequestBlocks, num_tokens: int, computed: tuple[list[int], ...] = NO_BLOCKS
    ) -> int | None:
        """Lengthen the tables until they have room for `num_tokens` tokens, and for those that a draft model computes ahead.
        Empty tables begin with the blocks `computed`.

        Returns:
            how many entries were appended to each table. None if there are too few free blocks; then nothing was changed.
        """
        length = -(-(num_tokens + self._num_ahead_tokens) // self.block_size)
        needed = length - len(blocks.tables[0])
        if needed <= 0:
            return 0
        num_computed = len(computed[0]) if computed else 0
        first = length - needed + num_computed  # the first new block
        num_states = sum(group.has_states for group in self.groups)
        num_attention_blocks = (length - first) * (self.num_groups - num_states)
        # the block of the state after the last token, and of those after the tokens ahead
        written = range(max(first, -(-num_tokens // self.block_size) - 1), length)
        snapshots = [i for i in range(first, length) if self.is_snapshot(blocks, i)] if num_states else []
        room = self.pool.num_free_blocks - sum(map(self.pool.count_free, computed)) - num_attention_blocks
        while len({*snapshots, *written}) * num_states > room:
            if not snapshots:
                return None
            snapshots.pop(0)  # too few blocks are free: the sequence goes on without this snapshot
        with_state = {*snapshots, *written}
        blocks.num_found += num_computed
        for table, shared in zip(blocks.tables, computed, strict=False):
            self.pool.touch(shared)
            table.extend(shared)
        for table, group in zip(blocks.tables, self.groups, strict=True):
            if group.has_states:
                new = iter(self.pool.allocate(len(with_state)))
                table.extend(next(new) if i in with_state else DUMMY_BLOCK for i in range(first, length))
            else:
                table.extend(self.pool.allocate(length - first))
        return needed

    def has_full_blocks(self, blocks: RequestBlocks, num_computed_tokens: int) -> bool:
        """Whether there are full blocks that `commit` has not processed."""
        return num_computed_tokens // self.block_size > blocks.num_committed

    def num_known_tokens(self, blocks: RequestBlocks) -> int:
        """How many of the first tokens need not be given to `commit`: usually those of all blocks that have names. If events
        are recorded (`watch_blocks`), only those of committed blocks, because an event has the tokens of its block."""
        return (len(blocks.hashes) if self._events is None else blocks.num_committed) * self.block_size

    def commit(
        self, blocks: RequestBlocks, token_ids: Int32Array, num_computed_tokens: int, *, first_token: int = 0
    ) -> None:
        """Name full blocks, and free blocks that are outside the sliding window now. Call this when tokens
        `[0, num_computed_tokens)` are computed, and only if `has_full_blocks` is true. `token_ids` are the tokens from position
        `first_token` on, which may be up to `num_known_tokens`."""
        num_full = num_computed_tokens // self.block_size
        is_named = self._caching and blocks.may_be_named
        if is_named:
            self._hasher.extend(blocks.root, blocks.hashes, token_ids, num_full, first_token=first_token)
        for group, table in zip(self.groups, blocks.tables, strict=True):
            if is_named:
                for i in range(blocks.num_committed, num_full):
                    if table[i] != DUMMY_BLOCK and (not group.has_states or self.is_snapshot(blocks, i)):
                        group.name(table[i], blocks.hashes[i])
            # a state after a full block is kept until the next block is full: see `name_last_state`
            end = num_full * self.block_size if group.has_states else num_computed_tokens
            group.leave_window(blocks, table, end)
        if self._events is not None and is_named:
            self._events.record_stored(blocks, blocks.num_committed, num_full, token_ids, first_token)
        blocks.num_committed = num_full

    def name_last_state(self, blocks: RequestBlocks) -> bool:
        """Name the states of recurrent layers after the last full block, if the request has computed it. Call this before
        `free`. Returns whether the last full blocks should be saved, as another request may go on there."""
        last = blocks.num_committed - 1
        if last >= blocks.num_found and self._caching and blocks.may_be_named:
            for group, table in zip(self.groups, blocks.tables, strict=True):
                if not group.is_whole and table[last] != DUMMY_BLOCK:
                    if group.has_states:
                        group.name(table[last], blocks.hashes[last])
                    blocks.num_before_last_state = blocks.num_committed
        return 0 < blocks.num_before_last_state == blocks.num_committed

    def free(self, blocks: RequestBlocks) -> None:
        """Free all blocks, the last one first, so that the first ones, which other requests can share, are evicted last.
        Idempotent."""
        if self._partings is not None:
            self._partings.record_end(blocks)
        for table in blocks.tables:
            self.pool.free(reversed(table))
            table.clear()
        blocks.num_committed = blocks.num_found = 0

    def reset_prefix_cache(self, running: Iterable[RequestBlocks]) -> None:
        """Remove all names. `running`: the blocks of all requests that have blocks now."""
        self.pool.forget_all()
        if self._events is not None:
            self._events.record_reset()
        for blocks in running:
            blocks.may_be_named = False

    def check_integrity(self, live: list[RequestBlocks], referenced: Mapping[int, int] = _NO_REFERENCES) -> None:
        """Assert that each block's reference count is the number of live tables that contain it, and of references that are
        `held` besides."""
        references = {block_id: count for block_id, count in referenced.items() if count}
        for blocks in live:
            assert len({len(table) for table in blocks.tables}) == 1
            for table in blocks.tables:
                for block_id in table:
                    if block_id != DUMMY_BLOCK:
                        references[block_id] = references.get(block_id, 0) + 1
        self.pool.check_integrity(references)

    def is_snapshot(self, blocks: RequestBlocks, index: int) -> bool:
        """Whether others may share the state after the tokens of this block: if the block is the last one before a multiple of
        `checkpoint_tokens`, before the end of the prompt or before a parting, or if `name_last_state` made it a snapshot, or a
        fetch wants it."""
        end = (index + 1) * self.block_size
        distance = self._checkpoint_tokens
        is_last = (end + self.block_size - 1) // distance > (end - 1) // distance
        wanted = blocks.num_prompt_blocks, blocks.num_before_last_state, blocks.num_shared
        return self._caching and (is_last or index + 1 in wanted)
