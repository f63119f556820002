"""`CachedIndex`: what a front end knows of an engine's prefix cache: the names of its blocks.

The engine reports each name that its cache gets or loses (`CachedBlocks`), usually within 50 ms. The names are those of
kv_cache/block_hash.py, so a block with the same tokens but another `cache_salt` is no hit. A prompt that was sent to the engine
counts as cached already, until its request ends: the engine computes it for the first of several requests, and the others wait
for its blocks. The index only helps to choose a replica. If it is out of date, or full, another replica may compute the
request, with the same result.
"""

from collections import Counter
from collections.abc import Collection, Iterator

from inflight.interface.serving import CachedBlocks
from inflight.kv_cache.block_hash import NAME_BYTES

MAX_INDEX_BYTES = 64 * 2**20  # for each engine
ENTRY_BYTES = 128  # of memory for each name: the bytes object, and its share of the set


class CachedIndex:
    def __init__(self) -> None:
        self._names: set[bytes] = set()
        self._expected: Counter[bytes] = Counter()  # name -> how many unfinished requests have it in their prompts
        self._prompts: dict[str, bytes] = {}  # request id -> the names of its prompt, of those in `_expected`

    def __len__(self) -> int:
        return len(self._names)

    def clear(self) -> None:
        self._names.clear()
        self._expected.clear()
        self._prompts.clear()

    def apply(self, message: CachedBlocks) -> None:
        """Process a report. If the index is full, new names are left out."""
        if message.is_first:
            self._names.clear()
        self._names.difference_update(split(message.removed))
        self._names.update(split(message.stored[: self._room() * NAME_BYTES]))

    def expect(self, request_id: str, names: bytes) -> None:
        """Count the prompt of a request that is sent now, until `forget`. If the index is full, it does not count."""
        if names and len(names) // NAME_BYTES <= self._room():
            self._prompts[request_id] = names
            self._expected.update(split(names))

    def forget(self, request_id: str) -> None:
        """The request has ended, or has left the engine. Reports say what is left of its prompt."""
        for name in split(self._prompts.pop(request_id, b"")):
            self._expected[name] -= 1
            if not self._expected[name]:
                del self._expected[name]

    def num_cached(self, names: bytes, more: Collection[bytes] = ()) -> int:
        """Returns how many of the first blocks with these names, one after another in `names`, are cached. Those with a name in
        `more` count, too."""
        for i, name in enumerate(split(names)):
            if not (name in self._names or name in self._expected or name in more):
                return i
        return len(names) // NAME_BYTES

    def _room(self) -> int:
        return max(MAX_INDEX_BYTES // ENTRY_BYTES - len(self._names) - len(self._expected), 0)


def split(names: bytes) -> Iterator[bytes]:
    return (names[i : i + NAME_BYTES] for i in range(0, len(names), NAME_BYTES))
