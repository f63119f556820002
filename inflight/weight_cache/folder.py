"""`CacheFolder`: the folder of the packed weights, with up to three files for each entry.

    KEY.weights   the bytes of the weights. Never changed after it has this name, because engines map it
    KEY.index     what the bytes mean, and the identity of KEY.weights (`FileIdentity`). Its modification time is the last use
    KEY.peaks     the peak memory of steps (peak_memory.py)
    KEY.partial   weights that are being written. Whoever writes them holds a lock on the file (flock)

Engines trust what they map. So the folder and its files must belong to the user, and nobody else may be able to write to them.
"""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

WEIGHTS, INDEX, PEAKS, PARTIAL = ".weights", ".index", ".peaks", ".partial"
_MAX_READ_BYTES = 1 << 28  # of the files that are read; the weights are mapped
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class UnusableFolderError(Exception):
    """The folder cannot be used; the message says why, and what to do."""


@dataclass(frozen=True)
class Entry:
    """The files of one key. `used_at`: when the entry was used last, in seconds since the epoch."""

    key: str
    num_bytes: int
    used_at: float


class CacheFolder:
    """The folder may be used by several processes at once, and deleted at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self) -> None:
        """Makes the folder if it does not exist.

        Raises:
            UnusableFolderError: it cannot be made, belongs to another user, or others may write to it.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.path.stat()
        except OSError as error:
            raise UnusableFolderError(f"{self.path} cannot be used ({error.strerror})") from error
        problem = _ownership_problem(status)
        if problem is not None:
            raise UnusableFolderError(f"{self.path} {problem}")

    def file(self, key: str, suffix: str) -> Path:
        return self.path / f"{key}{suffix}"

    def open(self, key: str, suffix: str) -> int | None:
        """Opens a file of an entry for reading; None if it does not exist, if others may have written it, or if it is too large
        to be read whole. The caller closes it."""
        try:
            # a pipe with this name would wait for a writer
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            opened = os.open(self.file(key, suffix), flags)
        except OSError:
            return None
        status = os.fstat(opened)
        is_small = suffix == WEIGHTS or status.st_size <= _MAX_READ_BYTES
        if stat.S_ISREG(status.st_mode) and is_small and _ownership_problem(status) is None:
            return opened
        os.close(opened)
        return None

    @contextmanager
    def partial(self, key: str) -> Iterator[int | None]:
        """A new file for the weights of `key`, open for writing; None if another process writes them now. The caller renames
        it. If it is still there at the end, it is deleted."""
        path = self.file(key, PARTIAL)
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if not _lock(opened, path):
                yield None
                return
            os.ftruncate(opened, 0)  # drops what a killed process has left
            try:
                yield opened
            finally:
                if _is_same_file(opened, path):
                    path.unlink()
        finally:
            os.close(opened)

    def touch(self, key: str) -> None:
        """Records that the entry was used now."""
        with suppress(OSError):
            os.utime(self.file(key, INDEX))

    def remove(self, key: str) -> None:
        """Engines that have mapped the weights keep them."""
        for suffix in (INDEX, WEIGHTS, PEAKS):  # without its index, a file of weights is not used
            with suppress(OSError):
                self.file(key, suffix).unlink()

    def entries(self) -> list[Entry]:
        """The entries, the least recently used first."""
        found = list[Entry]()
        with suppress(OSError):
            for path in self.path.glob(f"*{WEIGHTS}"):
                found += _entry(path)
        return sorted(found, key=lambda entry: entry.used_at)

    def make_room(self, num_bytes: int, limit_bytes: int) -> None:
        """Deletes the least recently used entries, until there is room for `num_bytes` more within the limit. Also deletes
        files that killed processes have left."""
        with suppress(OSError):
            for path in self.path.glob(f"*{PARTIAL}"):
                _remove_abandoned(path)
        entries = self.entries()
        total = num_bytes + sum(entry.num_bytes for entry in entries)
        for entry in entries:
            if total <= limit_bytes:
                return
            self.remove(entry.key)
            total -= entry.num_bytes


def _ownership_problem(status: os.stat_result) -> str | None:
    if status.st_uid != os.geteuid():
        return f"belongs to the user with the number {status.st_uid}, not to you; set XDG_CACHE_HOME to a folder of your own"
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return "can be written by other users; `chmod go-w` it"
    return None


def _entry(weights: Path) -> list[Entry]:
    try:
        num_bytes = weights.stat().st_size
    except OSError:
        return []  # deleted meanwhile
    used_at = 0.0  # without an index: a process was killed between its two files, or is writing the second one
    with suppress(OSError):
        used_at = weights.with_suffix(INDEX).stat().st_mtime
    return [Entry(weights.stem, num_bytes, used_at)]


def _lock(opened: int, path: Path) -> bool:
    """Whether this process has the lock now and the file still has this name. (Its last owner may have renamed it.)"""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return _is_same_file(opened, path)


def _is_same_file(opened: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), path.stat(follow_symlinks=False))
    except OSError:
        return False


def _remove_abandoned(path: Path) -> None:
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if _lock(opened, path):
            path.unlink()
    finally:
        os.close(opened)
