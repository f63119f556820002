"""`ReportedNames`: what routers must know of a prefix cache to say how much of a prompt it has.

Layers need different blocks of a prompt: all of them (full attention), the last ones (sliding windows), or only a state after
the last one (recurrent layers, which need one block). The KV groups that need equally many blocks are one *kind*. A report says
of each kind which blocks of its groups are all cached. `CachedIndex` finds out from these how much an engine would find.
"""

from inflight.kv_cache.cached_names import CachedNames
from inflight.kv_cache.manager import KVCacheManager


class ReportedNames:
    """
    Attributes:
        kinds: for each kind how many of the last blocks a token needs; 0: all blocks.
    """

    def __init__(self, kv_cache: KVCacheManager) -> None:
        groups = dict[int, list[int]]()
        for index, group in enumerate(kv_cache.groups):
            if group.is_whole or group.num_needed:
                groups.setdefault(group.num_needed, []).append(index)
        self.kinds = tuple(sorted(groups))
        self.names = [CachedNames(kv_cache.pool, *groups[kind]) for kind in self.kinds]

    def take(self) -> dict[bytes, bool]:
        """Returns what has changed since the last call: names, each with the number of its kind in one more byte, and whether
        all groups of the kind have the block now."""
        changes = [names.take() for names in self.names]
        return {name + bytes([i]): is_cached for i, each in enumerate(changes) for name, is_cached in each.items()}

    def present(self) -> dict[bytes, bool]:
        """Returns all names that are cached now, as `take`."""
        return {name + bytes([i]): True for i, names in enumerate(self.names) for name in names.present()}
