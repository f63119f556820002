"""`TierStack`: the tiers of one rank, in the order in which they are asked. Several threads call it."""

import mmap
import threading
from collections import Counter
from collections.abc import Sequence

from inflight.config.kv_tiers import KVTierConfig
from inflight.kv_connector.guarded_tier import AbandonedError, GuardedTier
from inflight.kv_connector.tier_object import HEADER, TierObject, padded
from inflight.kv_connector.tier_selector import open_tier


class TierStack:
    """Each calling thread has a staging buffer of its own, of the size of one object.

    Args:
        root: 32 bytes, SHA-256 over all that gives payloads their meaning: the weights' contents, numerics, layout, this rank's
            part.
        shard: names this rank's part, as a folder: "tp0of2-pp0of1".
        num_shards: how many ranks store objects. A limit of bytes is divided among them.
        payload_bytes: the length of the longest payload.

    Raises:
        ConfigError: a tier cannot be made.
    """

    def __init__(
        self, configs: Sequence[KVTierConfig], *, root: bytes, shard: str, num_shards: int, payload_bytes: int
    ) -> None:
        self._object_bytes = padded(payload_bytes)
        self._staging = threading.local()
        self._tiers: list[tuple[TierObject, GuardedTier]] = []
        seen = Counter[str]()
        try:
            for config in configs:
                seen[config.type] += 1
                guarded = GuardedTier(
                    open_tier(config, shard, num_shards),
                    label=config.type if seen[config.type] == 1 else f"{config.type}-{seen[config.type]}",
                    timeout_seconds=config.timeout_seconds,
                    max_operations=config.max_operations,
                )
                self._tiers.append((TierObject(root, config.checksum_key), guarded))
        except BaseException:
            self.close()
            raise

    def fetch(self, key: bytes) -> tuple[memoryview, int] | None:
        """Returns the verified payload, and the number of the tier that had it. The payload is in this thread's staging buffer:
        it is valid until this thread's next call. Returns None if no tier has a good one; never raises."""
        for number, (sealed, tier) in enumerate(self._tiers):
            buffer, name = self._buffer(), sealed.name(key)
            try:
                length = tier.get(name, buffer)
            except AbandonedError:
                del self._staging.buffer
                continue
            if length is None:
                continue
            payload = sealed.payload(buffer, name, length)
            tier.count(**{"checksum_failures" if payload is None else "hits": 1})
            if payload is not None:
                return payload, number
            tier.discard(name)
        return None

    def store(self, key: bytes, payload: memoryview, stop: int | None = None) -> bool:
        """Writes a payload to those of the first `stop` tiers that lack it (None: of all tiers). Returns whether all of these
        have it now; never raises. `payload` may be what this thread's `fetch` has returned."""
        are_good = []
        for sealed, tier in self._tiers[:stop]:
            buffer, name = self._buffer(), sealed.name(key)
            buffer[HEADER.size : HEADER.size + len(payload)] = payload
            try:
                are_good.append(tier.put(name, sealed.seal(buffer, name, len(payload))))
            except AbandonedError:
                del self._staging.buffer
                are_good.append(False)
        return all(are_good)

    def take_counts(self) -> dict[str, dict[str, float]]:
        """Returns the counts since the last call: label of the tier ("fs", "redis", "obj", "custom"; "fs-2" is the second one
        of its type) -> a name of `guarded_tier.COUNTS` -> number."""
        return {tier.label: tier.take_counts() for _, tier in self._tiers}

    def close(self) -> None:
        """Closes all tiers. Calls that wait return as if the tiers had failed."""
        for _, tier in self._tiers:
            tier.close()

    def _buffer(self) -> memoryview:
        """This thread's staging buffer, page-aligned. It is a new one if a late operation may still use the old one."""
        if not hasattr(self._staging, "buffer"):
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._staging.buffer = memoryview(mmap.mmap(-1, self._object_bytes, flags=flags))
        buffer: memoryview = self._staging.buffer
        return buffer
