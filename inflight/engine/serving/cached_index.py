"""`CachedIndex`: what a front end knows of an engine's prefix cache: the names of its blocks.

The engine reports each name that its cache gets or loses (`CachedBlocks`), usually within 50 ms. The names are those of
kv_cache/block_hash.py, so a block with the same tokens but another `cache_salt` is no hit. Each one has a byte more, the
number of a kind of layers (kv_cache/reported_names.py): a token of full attention needs all blocks before it, with sliding
windows or recurrent layers only the last ones. So the index finds what the engine would find. A prompt that was sent to the
engine counts as cached already, until its request ends: the engine computes it for the first of several requests, and the
others wait for its blocks. Of windows and states only those at its end count: where prompts part, the engine keeps some only
later. The index only helps to choose a replica. If it is out of date, or full, another replica may compute the request, with
the same result.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from inflight.interface.serving import CachedBlocks
from inflight.kv_cache.block_hash import NAME_BYTES

ENTRY = NAME_BYTES + 1  # of a name with its kind

MAX_INDEX_BYTES = 64 * 2**20  # for each engine
ENTRY_BYTES = 128  # of memory for each name: the bytes object, and its share of the set


class CachedIndex:
    """
    Attributes:
        kinds: for each kind of layers how many of the last blocks a token needs; 0: all blocks.
    """

    def __init__(self) -> None:
        self.kinds: tuple[int, ...] = (0,)
        self._names: set[bytes] = set()
        self._expected: Counter[bytes] = Counter()  # name -> how many unfinished requests have it in their prompts
        self._prompts: dict[str, list[bytes]] = {}  # request id -> the names of its prompt that are in `_expected`

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
            self.kinds = message.kinds or self.kinds
        self._names.difference_update(split(message.removed, ENTRY))
        self._names.update(split(message.stored[: self._room() * ENTRY], ENTRY))

    def expect(self, request_id: str, names: bytes) -> None:
        """Count the prompt of a request that is sent now, until `forget`. If the index is full, it does not count."""
        entries = self.entries(names)
        if entries and len(entries) <= self._room():
            self._prompts[request_id] = entries
            self._expected.update(entries)

    def forget(self, request_id: str) -> None:
        """The request has ended, or has left the engine. Reports say what is left of its prompt."""
        for name in self._prompts.pop(request_id, ()):
            self._expected[name] -= 1
            if not self._expected[name]:
                del self._expected[name]

    def entries(self, names: bytes) -> list[bytes]:
        """Returns what the engine will have cached when it has computed a prompt whose blocks have these names, one after
        another: each name with its kind."""
        every = list(split(names, NAME_BYTES))
        return [name + bytes([kind]) for kind, needed in enumerate(self.kinds) for name in every[-needed:]]

    def num_cached(self, names: bytes, more: Collection[bytes] = ()) -> int:
        """Returns how many of the first blocks with these names, one after another in `names`, the engine would find. What is
        in `more` (see `entries`) counts as cached, too."""
        every = list(split(names, NAME_BYTES))
        count, previous = len(every), -1
        while count != previous:  # until all kinds have the same number
            previous = count
            for kind, needed in enumerate(self.kinds):
                count = self._longest(every, count, bytes([kind]), needed, more)
        return count

    def _longest(self, names: Sequence[bytes], limit: int, kind: bytes, needed: int, more: Collection[bytes]) -> int:
        """Returns the largest n <= limit for which this kind has what the token after n blocks needs."""
        run = 0
        for i in range(limit)[::-1] if needed else range(limit):
            if needed and run >= needed:
                return i + 1 + run
            name = names[i] + kind
            is_cached = name in self._names or name in self._expected or name in more
            if not (is_cached or needed):
                return i
            run = run + 1 if is_cached else 0
        return run

    def _room(self) -> int:
        return max(MAX_INDEX_BYTES // ENTRY_BYTES - len(self._names) - len(self._expected), 0)


def split(names: bytes, size: int) -> Iterator[bytes]:
    return (names[i : i + size] for i in range(0, len(names), size))
