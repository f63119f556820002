"""`FsTier`: objects as files of a folder, which several engines may share. The folder itself is the index.

    folder/3f/3f09…(64 digits)                      an object; its time of modification says when it was last used
    folder/3f/3f09….0123456789abcdef.tmp            an object that is being written; it is renamed when it is whole

Files are read and written with O_DIRECT, past the page cache, where the file system can do that. A thread sweeps the folder at
the start, and whenever this `FsTier` has written 1/16 of `max_bytes`. It removes what dead writers left. If the objects take
more than 15/16 of `max_bytes`, it removes the least recently used ones until the others take 9/10. Nothing is synced: after a
power failure the digests tell which objects are whole. Other files in the folder are left alone.
"""

import errno
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from inflight.config.kv_tiers import KVTierConfig
from inflight.errors import ConfigError
from inflight.kv_connector.tier import Tier

logger = logging.getLogger(__name__)

_OBJECT = re.compile(r"/[0-9a-f]{64}\Z")
_TEMPORARY = re.compile(r"/[0-9a-f]{64}\.[0-9a-f]{16}\.tmp\Z")
_USED_AGAIN_SECONDS = 60.0  # the time of last use may be wrong by so much


class FsTier(Tier):
    """
    Args:
        shard: the folder within `config.path` for this rank's objects.
        num_shards: `config.max_bytes` is divided among so many such folders.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, config: KVTierConfig, shard: str, num_shards: int) -> None:
        assert config.path is not None
        self._folder = os.path.join(config.path, shard)
        self._num_shards = num_shards
        self._max_bytes = config.max_bytes // num_shards  # 0 until the first sweep has measured what is free
        self._stale_seconds = 10 * config.timeout_seconds  # a writer that needs longer has probably died
        self._direct = os.O_DIRECT  # 0 once the file system has refused it
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"secondary_tiers: the folder {self._folder!r} cannot be made: {error.strerror}; give another path"
            ) from error
        self._lock = threading.Lock()
        self._unswept_bytes = 0
        self._is_closed = False
        self._wake = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep_again, name="inflight-fs-sweep", daemon=True)
        self._sweeper.start()

    def get(self, name: bytes, into: memoryview) -> int | None:
        try:
            file = self._open(self._path(name), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(file)
            done, end = 0, min(status.st_size, len(into))
            while done < end and (got := os.preadv(file, [into[done:]], done)):
                done += got
            if time.time() - status.st_mtime > _USED_AGAIN_SECONDS:
                with suppress(OSError):  # the folder may be read-only
                    os.utime(file)
            return status.st_size if done == end else done
        finally:
            os.close(file)

    def put(self, name: bytes, data: memoryview) -> None:
        path = self._path(name)
        if os.path.lexists(path):
            return
        temporary = f"{path}.{secrets.token_hex(8)}.tmp"
        try:
            self._write(temporary, data)
            os.rename(temporary, path)  # over the same bytes if another writer was faster
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        with self._lock:
            self._unswept_bytes += len(data)
            if self._unswept_bytes >= self._max_bytes // 16:
                self._unswept_bytes = 0
                self._wake.set()

    def discard(self, name: bytes) -> None:
        Path(self._path(name)).unlink(missing_ok=True)

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()
        self._sweeper.join(1.0)

    def sweep(self) -> None:
        """Removes old temporary files, and objects if there are too many bytes.

        Raises:
            OSError: the folder cannot be read or written.
        """
        objects, total = [], 0  # (last use, bytes, path)
        for path, status in self._files():
            if _OBJECT.search(path):
                objects.append((status.st_mtime_ns, status.st_size, path))
                total += status.st_size
            elif _TEMPORARY.search(path) and time.time() - status.st_mtime > self._stale_seconds:
                Path(path).unlink(missing_ok=True)  # another engine may have been faster
        if not self._max_bytes:
            self._max_bytes = (total + shutil.disk_usage(self._folder).free // self._num_shards) // 2
        if total <= self._max_bytes - self._max_bytes // 16:
            return
        for _, num_bytes, path in sorted(objects):
            if total <= self._max_bytes * 9 // 10 or self._is_closed:
                break
            Path(path).unlink(missing_ok=True)
            total -= num_bytes

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        for number in range(256):
            with suppress(FileNotFoundError), os.scandir(f"{self._folder}/{number:02x}") as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # another engine has removed it
                        if entry.is_file(follow_symlinks=False):
                            yield entry.path, entry.stat(follow_symlinks=False)

    def _sweep_again(self) -> None:
        while not self._is_closed:
            try:
                self.sweep()
            except OSError as error:
                logger.warning("KV tier fs: %s could not be swept of old files: %s", self._folder, error.strerror)
            self._wake.wait()
            self._wake.clear()

    def _path(self, name: bytes) -> str:
        return f"{self._folder}/{name[:1].hex()}/{name.hex()}"

    def _write(self, path: str, data: memoryview) -> None:
        flags = os.O_WRONLY | os.O_CREAT
        try:
            file = self._open(path, flags)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            file = self._open(path, flags)
        try:
            done = 0
            while done < len(data):
                done += os.pwritev(file, [data[done:]], done)
        finally:
            os.close(file)

    def _open(self, path: str, flags: int) -> int:
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(path, flags | self._direct, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._direct = 0
            return os.open(path, flags, 0o600)
