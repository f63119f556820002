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

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from inflight.interface.kv_cache import DUMMY_BLOCK, KVCacheConfig
from inflight.interface.request import Int32Array
from inflight.kv_cache.block_events import BlockEvents
from inflight.kv_cache.block_hash import BlockHasher
from inflight.kv_cache.block_pool import BlockKey, BlockPool
from inflight.kv_cache.cached_names import CachedNames
from inflight.kv_cache.groups import CacheGroup

NO_BLOCKS: tuple[list[int], ...] = ()
_NOTHING_HELD: Mapping[int, int] = MappingProxyType({})


@dataclass(slots=True)
class RequestBlocks:
    """The block tables of one request (one per KV group, equally long), and the names of its full blocks."""

    tables: tuple[list[int], ...]
    root: bytes
    num_prompt_blocks: int = 0  # full blocks of the prompt without its last token
    hashes: list[bytes] = field(default_factory=list)  # names of the first blocks; more are computed when needed
    num_committed: int = 0  # blocks [0, num_committed) are full, computed, and processed by `commit`
    may_be_named: bool = True  # False: the blocks depend on tokens from before `reset_prefix_cache`
    num_found: int = 0  # the tables began with this many blocks from the cache or from a leader
    # after so many blocks there is one snapshot more: `name_last_state` made it, or a fetch wants it
    num_before_last_state: int = 0
    were_sought: bool = False  # whether `KVTransfers` has looked for them since the request last began to wait


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
        self._caching = enable_prefix_caching
        self._hasher = BlockHasher(fingerprint, self.block_size)
        self._unsalted_root = self._hasher.root("")
        self.pool = BlockPool(config.num_blocks)
        self._events: BlockEvents | None = None
        self._groups = [CacheGroup(index, group.spec, self.pool) for index, group in enumerate(config.groups)]

    def watch_names(self) -> CachedNames:
        """Returns an object that notes which names of blocks join and leave the prefix cache. Of several KV groups it watches
        the first one that has keys and values."""
        groups = [index for index, group in enumerate(self._groups) if not group.has_states]
        return CachedNames(self.pool, groups[0] if groups else 0)

    def watch_blocks(self) -> BlockEvents:
        """Like `watch_names`, but the object also notes the tokens of the blocks."""
        self._events = BlockEvents(self.watch_names(), self.block_size)
        return self._events

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, in [0, 1]."""
        return 1.0 - self.pool.num_free_blocks / (self.pool.num_blocks - 1)

    def new_request(self, cache_salt: str, num_prompt_tokens: int = 0) -> RequestBlocks:
        root, num_prompt_blocks = self._hasher.root(cache_salt), max(0, num_prompt_tokens - 1) // self.block_size
        return RequestBlocks(tuple([] for _ in self._groups), root, num_prompt_blocks)

    def get_computed_blocks(self, blocks: RequestBlocks, token_ids: Int32Array) -> tuple[list[int], ...]:
        """Returns for each group the blocks of the longest cached prefix of `token_ids`. It never includes the last token,
        because the last token must be computed to draw the next one."""
        if not self._caching:
            return NO_BLOCKS
        blocks.may_be_named = True
        num_hit = self.longest_hit(blocks, self.name_blocks(blocks, token_ids), self.pool.lookup)
        return tuple(group.cached_table(blocks.hashes, num_hit) for group in self._groups)

    def name_blocks(self, blocks: RequestBlocks, token_ids: Int32Array) -> int:
        """Compute the names of the full blocks of `token_ids`. Returns how many blocks are full without the last token."""
        self._hasher.extend(blocks.root, blocks.hashes, token_ids, len(token_ids) // self.block_size)
        return (len(token_ids) - 1) // self.block_size

    def longest_hit(self, blocks: RequestBlocks, limit: int, find: Callable[[BlockKey], int | None]) -> int:
        """Returns the largest n <= limit for which `find` finds all blocks that a request with n cached blocks needs."""
        num_hit, previous = limit, -1
        while num_hit != previous:  # until all groups have the same number of cached blocks
            previous = num_hit
            for group in self._groups:
                num_hit = group.longest_hit(blocks.hashes, num_hit, find)
        return num_hit

    def needed_keys(self, blocks: RequestBlocks, num_blocks: int) -> list[BlockKey]:
        """Returns the keys of all blocks that a request with `num_blocks` cached blocks needs, in the order of the tokens."""
        by_group = [group.needed_keys(blocks.hashes, num_blocks) for group in self._groups]
        lengths = max(map(len, by_group))
        return [keys[i - lengths] for i in range(lengths) for keys in by_group if i - lengths >= -len(keys)]

    def keys_at(self, blocks: RequestBlocks, index: int) -> list[tuple[BlockKey, bool]]:
        """Returns the key of each block with this index that `commit` or `name_last_state` names, and whether all later tokens
        need the block."""
        name, is_snapshot = blocks.hashes[index], self._is_snapshot(blocks, index)
        return [(group.key(name), group.is_whole) for group in self._groups if is_snapshot or not group.has_states]

    def share_prompt(self, blocks: RequestBlocks, leader: RequestBlocks, num_blocks: int) -> tuple[list[int], ...]:
        """Returns the leader's first blocks for the request of `blocks`, which has the same prompt. Returns NO_BLOCKS
        if this request needs a block that the leader has freed, because it is outside the leader's sliding window. The names of
        the shared blocks are not computed again."""
        tables = []
        for group, table in zip(self._groups, leader.tables, strict=True):
            if (shared := group.shared_table(table, num_blocks)) is None:
                return NO_BLOCKS
            tables.append(shared)
        blocks.may_be_named = leader.may_be_named
        blocks.hashes = blocks.hashes or leader.hashes[:num_blocks]
        return tuple(tables)

    def allocate_slots(
        self, blocks: RequestBlocks, num_tokens: int, computed: tuple[list[int], ...] = NO_BLOCKS
    ) -> int | None:
        """Lengthen the tables until they have room for `num_tokens` tokens. Empty tables begin with the blocks `computed`.

        Returns:
            how many entries were appended to each table. None if there are too few free blocks; then nothing was changed.
        """
        length = -(-num_tokens // self.block_size)
        needed = length - len(blocks.tables[0])
        if needed <= 0:
            return 0
        num_computed = len(computed[0]) if computed else 0
        first = length - needed + num_computed  # the first new block
        num_states = sum(group.has_states for group in self._groups)
        num_attention_blocks = (length - first) * (self.num_groups - num_states)
        snapshots = [i for i in range(first, length) if self._is_snapshot(blocks, i)] if num_states else []
        room = self.pool.num_free_blocks - sum(map(self.pool.count_free, computed)) - num_attention_blocks
        while len({*snapshots, length - 1}) * num_states > room:
            if not snapshots:
                return None
            snapshots.pop(0)  # too few blocks are free: the sequence goes on without this snapshot
        with_state = {*snapshots, length - 1}
        blocks.num_found += num_computed
        for table, shared in zip(blocks.tables, computed, strict=False):
            self.pool.touch(shared)
            table.extend(shared)
        for table, group in zip(blocks.tables, self._groups, strict=True):
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
        for group, table in zip(self._groups, blocks.tables, strict=True):
            if is_named:
                for i in range(blocks.num_committed, num_full):
                    if table[i] != DUMMY_BLOCK and (not group.has_states or self._is_snapshot(blocks, i)):
                        group.name(table[i], blocks.hashes[i])
            # a state after a full block is kept until the next block is full: see `name_last_state`
            end = num_full * self.block_size if group.has_states else num_computed_tokens
            group.leave_window(table, blocks.num_committed, end)
        if self._events is not None and is_named:
            is_salted = blocks.root != self._unsalted_root
            committed = blocks.hashes, blocks.num_committed, num_full
            self._events.note_commit(*committed, token_ids, first_token, is_salted=is_salted)
        blocks.num_committed = num_full

    def name_last_state(self, blocks: RequestBlocks) -> bool:
        """Name the states of recurrent layers after the last full block, if the request has computed it. Call this before
        `free`. Returns whether the last full block has a snapshot that should be saved."""
        last = blocks.num_committed - 1
        if last >= blocks.num_found and self._caching and blocks.may_be_named:
            for group, table in zip(self._groups, blocks.tables, strict=True):
                if group.has_states and table[last] != DUMMY_BLOCK:
                    group.name(table[last], blocks.hashes[last])
                    blocks.num_before_last_state = blocks.num_committed
        return 0 < blocks.num_before_last_state == blocks.num_committed

    def free(self, blocks: RequestBlocks) -> None:
        """Free all blocks, the last one first, so that the first ones, which other requests can share, are evicted last.
        Idempotent."""
        for table in blocks.tables:
            self.pool.free(reversed(table))
            table.clear()
        blocks.num_committed = blocks.num_found = 0

    def reset_prefix_cache(self, running: Iterable[RequestBlocks]) -> None:
        """Remove all names. `running`: the blocks of all requests that have blocks now."""
        self.pool.forget_all()
        if self._events is not None:
            self._events.note_reset()
        for blocks in running:
            blocks.may_be_named = False

    def check_integrity(self, live: list[RequestBlocks], held: Mapping[int, int] = _NOTHING_HELD) -> None:
        """Assert that each block's reference count is the number of live tables that contain it, and of references that are
        `held` besides."""
        references = {block_id: count for block_id, count in held.items() if count}
        for blocks in live:
            assert len({len(table) for table in blocks.tables}) == 1
            for table in blocks.tables:
                for block_id in table:
                    if block_id != DUMMY_BLOCK:
                        references[block_id] = references.get(block_id, 0) + 1
        self.pool.check_integrity(references)

    def _is_snapshot(self, blocks: RequestBlocks, index: int) -> bool:
        """Whether others may share the state after the tokens of this block: if the block is the last one before a multiple of
        `checkpoint_tokens` or before the end of the prompt, or if `name_last_state` made it a snapshot, or a fetch wants it."""
        end, distance = (index + 1) * self.block_size, self._checkpoint_tokens
        is_last = (end + self.block_size - 1) // distance > (end - 1) // distance
        return self._caching and (is_last or index + 1 in (blocks.num_prompt_blocks, blocks.num_before_last_state))
