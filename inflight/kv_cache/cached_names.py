"""`CachedNames`: which names of blocks have joined and left the prefix cache since the last report to the front ends."""

from inflight.kv_cache.block_pool import BlockKey, BlockPool


class CachedNames:
    """Watches some KV groups of a pool, or of several pools. A name is cached if one of the pools has the blocks of all these
    groups, or several pools have them together."""

    def __init__(self, pool: BlockPool, *groups: int) -> None:
        self._pools = list[BlockPool]()
        self._groups = groups
        self._changes: dict[bytes, bool] = {}  # name -> whether it is cached now
        self.add(pool)

    def add(self, pool: BlockPool) -> None:
        """Watch this pool, too. It must be empty."""
        self._pools.append(pool)
        pool.watchers.append(self._note)

    def _note(self, key: BlockKey, is_cached: bool) -> None:
        name, group = key
        if group in self._groups:
            self._changes[name] = self._is_cached(name)

    def _is_cached(self, name: bytes) -> bool:
        return all(any(pool.lookup((name, group)) is not None for pool in self._pools) for group in self._groups)

    def take(self) -> dict[bytes, bool]:
        """Returns the names that have changed since the last call, each with whether it is cached now."""
        changes = self._changes
        self._changes = {}
        return changes

    def present(self) -> dict[bytes, bool]:
        """Returns all names that are cached now."""
        keys = [key for pool in self._pools for key in pool.cached_keys()]
        return {name: True for name, group in keys if group == self._groups[0] and self._is_cached(name)}
