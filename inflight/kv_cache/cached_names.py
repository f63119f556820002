"""`CachedNames`: which names of blocks have joined and left the prefix cache since the last report to the front ends."""

from inflight.kv_cache.block_pool import BlockKey, BlockPool


class CachedNames:
    """Watches one KV group of a pool."""

    def __init__(self, pool: BlockPool, group: int) -> None:
        self._pool, self._group = pool, group
        self._changes: dict[bytes, bool] = {}  # name -> whether it is cached now
        pool.watchers.append(self._note)

    def _note(self, key: BlockKey, is_cached: bool) -> None:
        name, group = key
        if group == self._group:
            self._changes[name] = is_cached

    def take(self) -> dict[bytes, bool]:
        """Returns the names that have changed since the last call, each with whether it is cached now."""
        changes, self._changes = self._changes, {}
        return changes

    def present(self) -> dict[bytes, bool]:
        """Returns all names that are cached now."""
        return {name: True for name, group in self._pool.cached_keys() if group == self._group}
