"""`CachedIndex`: what a front end knows of an engine's prefix cache: the names of its blocks.

The engine reports each name that its cache gets or loses (`CachedBlocks`), usually within 50 ms. The names are those of
kv_cache/block_hash.py, so a block with the same tokens but another `cache_salt` is no hit. The index only helps to choose a
replica. If it is out of date, or full, another replica may compute the request, with the same result.
"""

from collections.abc import Iterator

from inflight.interface.serving import CachedBlocks
from inflight.kv_cache.block_hash import NAME_BYTES

MAX_INDEX_BYTES = 64 * 2**20  # for each engine
ENTRY_BYTES = 128  # of memory for each name: the bytes object, and its share of the set


class CachedIndex:
    def __init__(self) -> None:
        self._names: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._names)

    def clear(self) -> None:
        self._names.clear()

    def apply(self, message: CachedBlocks) -> None:
        """Process a report. If the index is full, new names are left out."""
        if message.is_first:
            self._names.clear()
        self._names.difference_update(_split(message.removed))
        room = MAX_INDEX_BYTES // ENTRY_BYTES - len(self._names)
        self._names.update(_split(message.stored[: max(room, 0) * NAME_BYTES]))

    def num_cached(self, names: bytes) -> int:
        """Returns how many of the first blocks with these names, one after another in `names`, are cached."""
        for i, name in enumerate(_split(names)):
            if name not in self._names:
                return i
        return len(names) // NAME_BYTES


def _split(names: bytes) -> Iterator[bytes]:
    return (names[i : i + NAME_BYTES] for i in range(0, len(names), NAME_BYTES))
