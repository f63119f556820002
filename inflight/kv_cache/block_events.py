"""`BlockEvents`: which blocks have joined the prefix cache, with their tokens, and which have left it, since the last call."""

from __future__ import annotations

from inflight.interface.block_events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored
from inflight.interface.request import Int32Array
from inflight.kv_cache.block_pool import BlockKey, BlockPool


class BlockEvents:
    """Watches one KV group of a pool. Blocks of requests with a `cache_salt` are left out: routers know blocks by their tokens
    only, and cannot tell such a block from one without a salt."""

    def __init__(self, pool: BlockPool, group: int, block_size: int) -> None:
        self._group, self._block_size = group, block_size
        self._new: set[bytes] = set()  # names that joined the cache, and are not told yet
        self._told: set[bytes] = set()  # names in the cache that were told
        self._events: list[BlockEvent] = []
        pool.watchers.append(self._note)

    def _note(self, key: BlockKey, is_cached: bool) -> None:
        name, group = key
        if group != self._group:
            return
        if is_cached:
            self._new.add(name)
        elif name in self._told:
            self._told.remove(name)
            if not (self._events and isinstance(last := self._events[-1], BlockRemoved)):
                self._events.append(last := BlockRemoved(block_hashes=[]))
            last.block_hashes.append(_number(name))
        else:
            self._new.discard(name)

    def note_commit(
        self, names: list[bytes], start: int, stop: int, token_ids: Int32Array, first_token: int, *, is_salted: bool
    ) -> None:
        """A request has committed its blocks [start, stop). `names` are the names of its first blocks, `token_ids` its tokens
        from position `first_token` on."""
        stored: BlockStored | None = None
        for index in range(start, stop) if self._new and not is_salted else ():
            name = names[index]
            if name not in self._new:  # the cache has this block already, or it is outside the sliding window
                stored = None
                continue
            if stored is None:
                parent = _number(names[index - 1]) if index else None
                stored = BlockStored(
                    block_hashes=[], parent_block_hash=parent, token_ids=[], block_size=self._block_size
                )
                self._events.append(stored)
            begin = index * self._block_size - first_token
            stored.block_hashes.append(_number(name))
            stored.token_ids += token_ids[begin : begin + self._block_size].tolist()
            self._told.add(name)
        self._new.clear()

    def note_reset(self) -> None:
        """All blocks have left the cache."""
        self._events = [AllBlocksCleared()]

    def take(self) -> list[BlockEvent]:
        """Returns what has happened since the last call."""
        events, self._events = self._events, []
        return events


def _number(name: bytes) -> int:
    return int.from_bytes(name[:8], "big")
