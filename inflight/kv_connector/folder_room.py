"""`FolderRoom`: how many bytes the objects of a folder take, and which of them are deleted when there is no room.

The bytes are counted in memory: those that a listing of the folder has found, plus what was stored and minus what was deleted
since. So a store costs the same whatever the folder has, and `max_bytes` holds at every moment for one engine. A thread lists
the folder at the start, when nearly all objects that the last listing has found are gone or used again, and after each quarter
of `max_bytes` that was stored, because other engines may share the folder. Between the parts of the folder it pauses, so that
the engine beside it keeps its cores, unless stores wait for the result.
"""

import errno
import heapq
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

logger = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)  # no bytes or no inodes are left, or the user's quota is used up
_OBJECT = re.compile(r"/[0-9a-f]{64}\Z")
_TEMPORARY = re.compile(r"/[0-9a-f]{64}\.[0-9a-f]{16}\.tmp\Z")
_NUM_PARTS = 256
_MAX_OLDEST = 2**17  # how many of the oldest objects a listing keeps in memory: 30 MB
_PAUSE = 9  # the thread pauses this many times as long as it lists


class _Object(NamedTuple):
    last_use: int  # in nanoseconds
    num_bytes: int
    path: str


class FolderRoom:
    """Several threads may call all methods.

    Args:
        max_bytes: the limit for the objects of the folder. 0: half of what is free and what they take.
        num_shards: the number of folders among which the disk is divided.
        stale_seconds: a temporary file that is older was left by a dead writer.
    """

    def __init__(self, folder: str, max_bytes: int, num_shards: int, stale_seconds: float) -> None:
        self.max_bytes = max_bytes
        self._folder = folder
        self._num_shards = num_shards
        self._stale_seconds = stale_seconds
        self._lock = threading.Lock()
        self._listing = threading.Lock()
        self._total = self._stored_since = 0
        self._oldest: list[_Object] = []  # of the last listing; the oldest one is the last
        self._few = 0  # if there are fewer of them left, the folder is listed again
        # during a listing: the next part, the bytes of the parts before it, and what was deleted meanwhile
        self._part = _NUM_PARTS
        self._listed_bytes = 0
        self._deleted: set[str] = set()
        self._is_closed = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._list_again, name="inflight-fs-list", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """What the objects take, as far as this engine knows."""
        return self._total

    def close(self) -> None:
        self._is_closed.set()
        self._wake.set()
        self._thread.join(1.0)

    def reserve(self, num_bytes: int) -> bool:
        """Make room for an object, by deleting the least recently used ones. Returns False if there is no room now: the object
        must not be stored.

        Raises:
            OSError: the folder cannot be written.
        """
        while self.max_bytes and self._total + num_bytes > self.max_bytes:
            if num_bytes > self.max_bytes or not self._delete_oldest():
                return False
        return True

    def free(self, num_bytes: int) -> bool:
        """Delete objects with at least `num_bytes` in all, because the disk is full. Returns False if no more objects are
        known.

        Raises:
            OSError: the folder cannot be written.
        """
        freed = 0
        while freed < num_bytes and (more := self._delete_oldest()):
            freed += more
        return freed > 0

    def place(self, temporary: str, path: str, num_bytes: int) -> None:
        """Rename a temporary file to an object, and count it. If another writer was faster, the object is replaced."""
        with self._lock:  # a listing counts an object before or after this, not in the middle
            is_new = not os.path.lexists(path)
            os.rename(temporary, path)
            if is_new:
                self._add(_part_of(path), num_bytes)
            self._stored_since += num_bytes
            is_due = bool(self.max_bytes) and self._stored_since >= self.max_bytes // 4
        if is_due:
            self._wake.set()

    def list_objects(self, pause: float = 0.0) -> None:
        """List the folder, and delete old temporary files, and objects above the limit. `pause`: how long to pause, times the
        time that the listing takes.

        Raises:
            OSError: the folder cannot be read or written.
        """
        with self._listing:
            self._list_objects(pause)
        self.reserve(0)

    def _list_objects(self, pause: float) -> None:
        with self._lock:
            self._part = self._listed_bytes = self._stored_since = 0
            self._deleted.clear()
        oldest = heapq.nsmallest(_MAX_OLDEST, self._objects(pause))
        if self._is_closed.is_set():
            return
        with self._lock:
            self._total = self._listed_bytes
            self._oldest = [each for each in reversed(oldest) if each.path not in self._deleted]
            self._few = len(self._oldest) // 8
            if not self.max_bytes:
                free = shutil.disk_usage(self._folder).free // self._num_shards
                self.max_bytes = (self._total + free) // 2

    def _objects(self, pause: float) -> Iterator[_Object]:
        now = time.time()
        for part in range(_NUM_PARTS):
            start = time.thread_time()  # not counting the time in which other threads run
            with self._lock:
                found = list(self._objects_of(part, now))
                self._part = part + 1
                self._listed_bytes += sum(each.num_bytes for each in found)
            yield from found
            seconds = 0.0 if self._is_awaited() else pause * (time.thread_time() - start)
            if self._is_closed.wait(seconds):
                return

    def _is_awaited(self) -> bool:
        """Whether nothing can be stored before the folder is listed."""
        return bool(self.max_bytes) and not self._oldest and self._total > self.max_bytes * 15 // 16

    def _objects_of(self, part: int, now: float) -> Iterator[_Object]:
        with suppress(FileNotFoundError), os.scandir(f"{self._folder}/{part:02x}") as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another engine has removed it
                    if not entry.is_file(follow_symlinks=False):
                        continue
                    status = entry.stat(follow_symlinks=False)
                    if _OBJECT.search(entry.path):
                        last_use = status.st_mtime_ns
                        if status.st_mtime > now + 1:  # the clock was wrong when it was used
                            with suppress(OSError):
                                os.utime(entry.path, (now, now))
                            last_use = os.stat(entry.path).st_mtime_ns
                        yield _Object(last_use, status.st_size, entry.path)
                    elif _TEMPORARY.search(entry.path) and now - status.st_mtime > self._stale_seconds:
                        os.unlink(entry.path)

    def _delete_oldest(self) -> int:
        """Delete the least recently used object. Returns its bytes; 0 if none is known."""
        while True:
            with self._lock:
                found = self._oldest.pop() if self._oldest else None
                is_due = len(self._oldest) <= self._few
            if is_due:
                self._wake.set()
            if found is None:
                return 0
            with self._lock:
                with suppress(FileNotFoundError):  # another engine was faster
                    if os.stat(found.path, follow_symlinks=False).st_mtime_ns != found.last_use:
                        continue  # it was used since
                    os.unlink(found.path)
                    with suppress(OSError):  # other objects are in this part, or another one is being written
                        os.rmdir(os.path.dirname(found.path))
                self._deleted.add(found.path)
                self._add(_part_of(found.path), -found.num_bytes)
            return found.num_bytes

    def _add(self, part: int, num_bytes: int) -> None:
        self._total = max(0, self._total + num_bytes)
        if part < self._part < _NUM_PARTS:  # the listing that is under way has passed this part
            self._listed_bytes += num_bytes

    def _list_again(self) -> None:
        while not self._is_closed.is_set():
            try:
                self.list_objects(_PAUSE)
            except OSError as error:
                logger.warning("KV tier fs: %s could not be swept of old files: %s", self._folder, error.strerror)
            self._wake.wait()
            self._wake.clear()


def _part_of(path: str) -> int:
    return int(os.path.basename(path)[:2], 16)
