"""`TierStack`: the tiers of one rank, in the order in which they are asked. Several threads call it."""

import itertools
import mmap
import threading
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from inflight.config.kv_tiers import KVTierConfig
from inflight.kv_connector.guarded_tier import AbandonedError, GuardedTier
from inflight.kv_connector.tier_object import HEADER, TierObject, padded
from inflight.kv_connector.tier_selector import open_tier


class _Tier(NamedTuple):
    sealed: TierObject
    guarded: GuardedTier
    blocks_per_chunk: int


class TierStack:
    """Each calling thread has a staging buffer of its own, of the size of the largest object.

    A tier with `blocks_per_chunk` stores so many blocks, which follow each other, as one object: a *chunk*. It consists of the
    objects of its blocks, one after the other. Its name is made from the key of its last block, so it depends on all tokens up
    to its end.

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
        self._buffer_bytes = self._object_bytes * max((config.blocks_per_chunk for config in configs), default=1)
        self._staging = threading.local()
        self._tiers: list[_Tier] = []
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
                self._tiers.append(_Tier(TierObject(root, config.checksum_key), guarded, config.blocks_per_chunk))
        except BaseException:
            self.close()
            raise

    def fetch(
        self, keys: Sequence[bytes], places: Sequence[int] = (0,), last_key: bytes = b""
    ) -> list[tuple[memoryview, int] | None]:
        """Looks for one block, or for some blocks of a chunk. Never raises.

        Args:
            keys: the keys of the blocks, in the order of the tokens.
            places: the numbers of the blocks in the chunk.
            last_key: the key of the last block of the chunk; empty if the block is in no chunk, or if the key is not known.

        Returns:
            for each block the verified payload and the number of the tier that had it, or None if no tier has a good one. The
            payloads are in this thread's staging buffer: they are valid until this thread's next call.
        """
        found: list[tuple[memoryview, int] | None] = [None] * len(keys)
        size = self._object_bytes
        starts = [(place - places[0]) * size for place in places]  # where the blocks begin in the buffer
        for number, tier in enumerate(self._tiers):
            if not (missing := [i for i, each in enumerate(found) if each is None]):
                break
            names = [tier.sealed.name(key) for key in keys]
            reads: list[tuple[bytes, int | None, list[int]]] = [(names[i], None, [i]) for i in missing]
            if tier.blocks_per_chunk > 1 and last_key:
                name = tier.sealed.name(_chunk_key(last_key, tier.blocks_per_chunk))
                # a read for each gap, because what nearer tiers had is in the buffer between them
                reads = [(name, places[run[0]] * size, run) for run in _runs(missing)] + reads
            for name, offset, indices in reads:
                if found[indices[0]] is not None:
                    continue
                payloads = self._read(tier, name, offset, [(names[i], starts[i]) for i in indices])
                for i, payload in zip(indices, payloads, strict=True):
                    found[i] = None if payload is None else (payload, number)
                if tier.blocks_per_chunk > 1 and offset is None and payloads[0] is None:
                    break  # without this block no later one can be used
        return found

    def _read(
        self, tier: _Tier, name: bytes, offset: int | None, blocks: Sequence[tuple[bytes, int]]
    ) -> list[memoryview | None]:
        """Reads blocks that follow each other from the object `name`. `offset`: as in `Tier.get_range`; None: the object is
        one block. `blocks`: the name of each one, and where it begins in the buffer. Returns the payloads that are good."""
        buffer = self._buffer()
        size = self._object_bytes
        first = blocks[0][1]
        end = blocks[-1][1] + size
        try:
            length = tier.guarded.get(name, buffer[first:end], offset)
        except AbandonedError:
            del self._staging.buffer
            length = None
        if length is None:
            return [None] * len(blocks)
        payloads = []
        for block_name, start in blocks:
            is_read = start + size - first <= length <= end - first
            num_bytes = length if offset is None else size * is_read
            payloads.append(tier.sealed.payload(buffer[start : start + size], block_name, num_bytes))
            tier.guarded.count(**{"checksum_failures" if payloads[-1] is None else "hits": 1})
        if any(payload is None for payload in payloads):
            tier.guarded.discard(name)
        return payloads

    def store(self, keys: Sequence[bytes], payloads: Sequence[memoryview], stop: int | None = None) -> bool:
        """Writes one block, or all blocks of a chunk, to those of the first `stop` tiers that lack them (None: to all tiers).
        Returns whether all of these have them now; never raises. Only a call with one payload may pass what `fetch` has
        returned, because that is in the buffer that is used here."""
        are_good = []
        for sealed, guarded, blocks_per_chunk in self._tiers[:stop]:
            num_together = blocks_per_chunk if blocks_per_chunk == len(keys) else 1
            for first in range(0, len(keys), num_together):
                buffer = self._buffer()
                end = 0
                for i in range(first, first + num_together):
                    part = buffer[end:]
                    payload = payloads[i]
                    part[HEADER.size : HEADER.size + len(payload)] = payload
                    end += len(sealed.seal(part, sealed.name(keys[i]), len(payload)))
                name = sealed.name(_chunk_key(keys[-1], num_together) if num_together > 1 else keys[first])
                try:
                    are_good.append(guarded.put(name, buffer[:end]))
                except AbandonedError:
                    del self._staging.buffer
                    are_good.append(False)
        return all(are_good)

    def touch(self, keys: Sequence[bytes]) -> bool:
        """Tells all tiers that a block, or all blocks of a chunk, are used. Returns False if one of them has lost it. Never
        raises."""
        has = []
        for sealed, guarded, blocks_per_chunk in self._tiers:
            names = [_chunk_key(keys[-1], len(keys))] if blocks_per_chunk == len(keys) > 1 else keys
            has += [guarded.touch(sealed.name(name)) for name in names]
        return all(has)

    def take_counts(self) -> dict[str, dict[str, float]]:
        """Returns the counts since the last call: label of the tier ("fs", "redis", "obj", "custom"; "fs-2" is the second one
        of its type) -> a name of `guarded_tier.COUNTS` -> number."""
        return {tier.guarded.label: tier.guarded.take_counts() for tier in self._tiers}

    def close(self) -> None:
        """Closes all tiers. Calls that wait return as if the tiers had failed."""
        for tier in self._tiers:
            tier.guarded.close()

    def _buffer(self) -> memoryview:
        """This thread's staging buffer, page-aligned. It is a new one if a late operation may still use the old one."""
        if not hasattr(self._staging, "buffer"):
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._staging.buffer = memoryview(mmap.mmap(-1, self._buffer_bytes, flags=flags))
        buffer: memoryview = self._staging.buffer
        return buffer


def _chunk_key(last_key: bytes, size: int) -> bytes:
    """The key of the chunk of `size` blocks whose last block has the key `last_key`."""
    return last_key + size.to_bytes(2, "little")


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Splits rising numbers where one is left out."""
    rank = itertools.count()
    return [list(run) for _, run in itertools.groupby(numbers, key=lambda number: number - next(rank))]
