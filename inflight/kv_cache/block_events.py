"""`BlockEvents`: which blocks have joined the prefix cache, with their tokens, and which have left it, since the last call."""

from inflight.interface.block_events import CLEARED, BlockEvent, ExtraKey, blocks_removed, blocks_stored
from inflight.interface.request import Int32Array
from inflight.kv_cache.cached_names import CachedNames
from inflight.kv_cache.request_blocks import RequestBlocks


class BlockEvents:
    """`names` watches one KV group of a pool. Blocks of requests with a `cache_salt` are left out: routers know blocks by their
    tokens only, and cannot tell such a block from one without a salt. `unsalted_root`: of the names of all other blocks."""

    def __init__(self, names: CachedNames, block_size: int, unsalted_root: bytes) -> None:
        self._names = names
        self._block_size = block_size
        self._unsalted_root = unsalted_root
        self._announced: set[bytes] = set()  # names in the cache whose events were sent
        self._events: list[BlockEvent] = []

    def _take_changes(self) -> set[bytes]:
        """Note which blocks have left the cache. Returns the names that have joined it since the last call."""
        changes = self._names.take()
        gone = [name for name, is_cached in changes.items() if not is_cached and name in self._announced]
        if gone:
            self._announced.difference_update(gone)
            self._events.append(blocks_removed([_number(name) for name in gone]))
        return {name for name, is_cached in changes.items() if is_cached} - self._announced

    def record_stored(
        self, blocks: RequestBlocks, start: int, stop: int, token_ids: Int32Array, first_token: int = 0
    ) -> None:
        """The blocks [start, stop) of a request may have joined the cache: it has committed or loaded them. `token_ids` are its
        tokens from position `first_token` on."""
        new = self._take_changes()
        names = blocks.hashes
        for index in range(start, stop) if new and blocks.root.name == self._unsalted_root else ():
            if (name := names[index]) not in new:  # the cache has this block already, or it is outside the window
                continue
            begin = index * self._block_size - first_token
            parent = _number(names[index - 1]) if index else None
            tokens = token_ids[begin : begin + self._block_size].tolist()
            first = index * self._block_size
            contents = [each for each in blocks.root.contents if each.is_in(first, self._block_size)]
            keys: list[ExtraKey] = [[each.digest.hex(), each.start - first] for each in contents]
            self._events.append(blocks_stored(_number(name), parent, tokens, keys))
            self._announced.add(name)

    def record_reset(self) -> None:
        """All blocks have left the cache."""
        self._take_changes()
        self._events = [CLEARED]

    def take(self) -> list[BlockEvent]:
        """Returns what has happened since the last call."""
        self._take_changes()
        events = self._events
        self._events = []
        return events


def _number(name: bytes) -> int:
    return int.from_bytes(name[:8], "big")
