"""`Tier`: storage for objects below host memory. A user's own class (`module_path`) implements it, too."""

from abc import ABC, abstractmethod


class Tier(ABC):
    """Several threads call one tier at the same time. Several engines may share what it stores.

    A user's class is made with one argument: the dictionary `options` of its configuration. Nothing that a tier returns is
    trusted: an object that does not verify counts as missing. Any exception counts as a failure. An operation that takes longer
    than the tier's `timeout_seconds` is left alone, and its buffer is not used for anything else.
    """

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

    def discard(self, name: bytes) -> None:
        """Removes an object that turned out to be damaged, so that the next `put` can replace it. No engine can use it,
        because all engines that ask for this name verify the object in the same way. By default nothing happens."""

    @abstractmethod
    def close(self) -> None:
        """Ends the tier. Called once. Calls that run, or that begin at the same moment, should soon fail."""
