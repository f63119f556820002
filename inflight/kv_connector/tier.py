"""`Tier`: storage for objects below host memory. A user's own class (`module_path`) implements it, too."""

from abc import ABC, abstractmethod
from typing import Self

from inflight.config.kv_tiers import KVTierConfig


class Tier(ABC):
    """Several threads call one tier at the same time. Several engines may share what it stores.

    Nothing that a tier returns is
    trusted: an object that does not verify counts as missing. Any exception counts as a failure. An operation that takes longer
    than the tier's `timeout_seconds` is left alone, and its buffer is not used for anything else.
    """

    @classmethod
    def open(cls, config: KVTierConfig, shard: str, num_shards: int) -> Self:
        """Makes the tier of a rank. By default the constructor gets the dictionary `options` of the configuration, so a user's
        class need not have this method.

        Args:
            shard: the name of the rank's part of the model. Names of objects do not contain it.
            num_shards: how many parts there are.
        """
        return cls(dict(config.options or {}))  # type: ignore[call-arg]  # each class has its own constructor

    @abstractmethod
    def get(self, name: bytes, into: memoryview) -> int | None:
        """Reads an object into the beginning of a page-aligned buffer.

        Args:
            name: 32 bytes.
            into: writable bytes. It may still contain bytes of other objects. It may be written until this call returns.

        Returns:
            The length of the object in bytes; None if there is none of this name. An object that is longer than `into` is
            damaged: return a length above that of `into`, or 0.
        """

    def get_range(self, name: bytes, into: memoryview, offset: int) -> int | None:
        """Reads the bytes from `offset` to `offset + len(into)` of an object. Returns how many of them the object has (0: it
        ends before `offset`); None if there is no object of this name. Called only if `blocks_per_chunk` is above 1."""
        raise NotImplementedError

    @abstractmethod
    def put(self, name: bytes, data: memoryview) -> None:
        """Stores an object if none of this name is there. A reader must find the whole object or none. `data` is page-aligned,
        its length is a multiple of 4096, and it may be read until this call returns."""

    def touch(self, name: bytes) -> bool:
        """Notes that an object is used, because an engine has found its block in a nearer place. So a tier that drops the least
        recently used objects keeps it. Returns False if there is no object of this name: then `put` stores it again. By default
        nothing happens."""
        return True

    def discard(self, name: bytes) -> None:
        """Removes an object that turned out to be damaged, so that the next `put` can replace it. No engine can use it,
        because all engines that ask for this name verify the object in the same way. By default nothing happens."""

    @abstractmethod
    def close(self) -> None:
        """Ends the tier. Called once. Calls that run, or that begin at the same moment, should soon fail."""
