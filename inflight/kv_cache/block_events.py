"""`BlockEvents`: which blocks have joined the prefix cache, with their tokens, and which have left it, since the last call."""

from inflight.interface.block_events import CLEARED, BlockEvent, blocks_removed, blocks_stored
from inflight.interface.request import Int32Array
from inflight.kv_cache.cached_names import CachedNames


class BlockEvents:
    """`names` watches one KV group of a pool. Blocks of requests with a `cache_salt` are left out: routers know blocks by their
    tokens only, and cannot tell such a block from one without a salt."""

    def __init__(self, names: CachedNames, block_size: int) -> None:
        self._names, self._block_size = names, block_size
        self._told: set[bytes] = set()  # names in the cache that were told
        self._events: list[BlockEvent] = []

    def _follow(self) -> set[bytes]:
        """Note which blocks have left the cache. Returns the names that have joined it since the last call."""
        changes = self._names.take()
        gone = [name for name, is_cached in changes.items() if not is_cached and name in self._told]
        if gone:
            self._told.difference_update(gone)
            self._events.append(blocks_removed([_number(name) for name in gone]))
        return {name for name, is_cached in changes.items() if is_cached} - self._told

    def note_commit(
        self, names: list[bytes], start: int, stop: int, token_ids: Int32Array, first_token: int, *, is_salted: bool
    ) -> None:
        """A request has committed its blocks [start, stop). `names` are the names of its first blocks, `token_ids` its tokens
        from position `first_token` on."""
        new = self._follow()
        for index in range(start, stop) if new and not is_salted else ():
            if (name := names[index]) not in new:  # the cache has this block already, or it is outside the window
                continue
            begin = index * self._block_size - first_token
            parent = _number(names[index - 1]) if index else None
            tokens = token_ids[begin : begin + self._block_size].tolist()
            self._events.append(blocks_stored(_number(name), parent, tokens))
            self._told.add(name)

    def note_reset(self) -> None:
        """All blocks have left the cache."""
        self._follow()
        self._events = [CLEARED]

    def take(self) -> list[BlockEvent]:
        """Returns what has happened since the last call."""
        self._follow()
        events, self._events = self._events, []
        return events


def _number(name: bytes) -> int:
    return int.from_bytes(name[:8], "big")
