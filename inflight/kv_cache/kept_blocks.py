"""`KeptBlocks`: which blocks of a sequence are worth a copy outside of the cache, and from which places a request can go on.

Of full attention all blocks are kept, because all later tokens need them. Of windows and recurrent layers only those before
some places (`ends`): where other requests are likely to go on.
"""

from collections.abc import Iterator

from inflight.kv_cache.block_pool import BlockKey
from inflight.kv_cache.manager import KVCacheManager
from inflight.kv_cache.request_blocks import RequestBlocks


class KeptBlocks:
    """
    Attributes:
        num_last: a token needs at most so many blocks before it of groups that are not of full attention.
    """

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._groups, self._is_snapshot = kv_cache.groups, kv_cache.is_snapshot
        self.num_last = max(group.num_needed for group in self._groups)

    def keys_at(self, blocks: RequestBlocks, index: int) -> list[tuple[BlockKey, bool]]:
        """Returns the key of each block with this index that is worth a copy, and whether all later tokens need the block."""
        name, is_snapshot = blocks.hashes[index], self._is_snapshot(blocks, index)
        return [
            (group.key(name), group.is_whole) for group in self._groups if group.is_kept(blocks, index, is_snapshot)
        ]

    def whole_keys(self, blocks: RequestBlocks, index: int) -> list[BlockKey]:
        """Returns the keys of the blocks with this index that all later tokens need."""
        return [group.key(blocks.hashes[index]) for group in self._groups if group.is_whole]

    def is_whole(self, key: BlockKey) -> bool:
        """Whether all later tokens need the block."""
        return self._groups[key[1]].is_whole

    def needed_keys(self, blocks: RequestBlocks, num_blocks: int) -> list[BlockKey]:
        """Returns the keys of all blocks that a request with `num_blocks` cached blocks needs, in the order of the tokens."""
        by_group = [group.needed_keys(blocks.hashes, num_blocks) for group in self._groups]
        lengths = max(map(len, by_group))
        return [keys[i - lengths] for i in range(lengths) for keys in by_group if i - lengths >= -len(keys)]

    def objects(self, blocks: RequestBlocks, num_blocks: int, per_chunk: int) -> list[list[BlockKey]]:
        """Returns the keys that `needed_keys` returns, those of each whole chunk of `per_chunk` blocks together."""
        found = list[list[BlockKey]]()
        for group in self._groups:
            keys, num_together = group.needed_keys(blocks.hashes, num_blocks), per_chunk if group.is_whole else 1
            rest = len(keys) - len(keys) % num_together
            found += [keys[first : first + num_together] for first in range(0, rest, num_together)]
            found += [[key] for key in keys[rest:]]
        return found

    def ends(self, blocks: RequestBlocks, limit: int) -> Iterator[int]:
        """After how many blocks a request may be able to go on, the largest number first: `limit`, and the smaller ones after
        which everything is kept that the next token needs."""
        for num_blocks in range(limit, 0, -1):
            if num_blocks == limit or all(
                self._is_snapshot(blocks, num_blocks - 1) if group.has_states else group.is_end(blocks, num_blocks)
                for group in self._groups
            ):
                yield num_blocks
