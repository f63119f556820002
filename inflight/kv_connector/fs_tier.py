"""`FsTier`: objects as files of a folder, which several engines may share. The folder itself is the index.

    folder/3f/3f09…(64 digits)                      an object; its time of modification says when it was last used
    folder/3f/3f09….0123456789abcdef.tmp            an object that is being written; it is renamed when it is whole

Files are read and written with O_DIRECT, past the page cache, where the file system can do that. `FolderRoom` counts the bytes,
and deletes the least recently used objects when there is no room, or when the disk is full. Nothing is synced: after a power
failure the digests tell which objects are whole. Other files in the folder are left alone.
"""

import os
import secrets
import time
from contextlib import suppress
from errno import EINVAL, EIO, EISDIR
from pathlib import Path
from typing import Self

from inflight.config.kv_tiers import KVTierConfig
from inflight.errors import ConfigError
from inflight.kv_connector.folder_room import FULL, FolderRoom
from inflight.kv_connector.tier import Tier

_UNREADABLE = (EIO, EISDIR)  # a bad sector; something that is no file
_USED_AGAIN_SECONDS = 60.0  # the time of last use may be wrong by so much


class FsTier(Tier):
    """
    Args:
        shard: the folder within `config.path` for this rank's objects.
        num_shards: the number of such folders among which `config.max_bytes` is divided.

    Raises:
        ConfigError: the folder cannot be made.
    """

    @classmethod
    def open(cls, config: KVTierConfig, shard: str, num_shards: int) -> Self:
        return cls(config, shard, num_shards)

    def __init__(self, config: KVTierConfig, shard: str, num_shards: int) -> None:
        assert config.path is not None
        self._folder = os.path.join(config.path, shard)
        self._direct = os.O_DIRECT  # 0 once the file system has refused it
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"secondary_tiers: the folder {self._folder!r} cannot be made: {error.strerror}; give another path"
            ) from error
        # a writer that needs more than ten times the time of an operation has probably died
        stale_seconds = 10 * config.timeout_seconds
        self._room = FolderRoom(self._folder, config.max_bytes // num_shards, num_shards, stale_seconds)

    def get(self, name: bytes, into: memoryview) -> int | None:
        path = self._path(name)
        try:
            file = self._open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        except PermissionError:
            if not _is_own(path):
                raise
            return 0  # as if it were damaged: it is deleted, and can be stored again
        try:
            status = os.fstat(file)
            done = 0
            end = min(status.st_size, len(into))
            while done < end and (got := os.preadv(file, [into[done:]], done)):
                done += got
            if abs(time.time() - status.st_mtime) > _USED_AGAIN_SECONDS:  # the clock may have been wrong
                with suppress(OSError):  # the folder may be read-only
                    os.utime(file)
            return status.st_size if done == end else done
        except OSError as error:
            if error.errno not in _UNREADABLE:
                raise
            return 0
        finally:
            os.close(file)

    def touch(self, name: bytes) -> bool:
        try:
            os.utime(self._path(name), follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError:  # the folder may be read-only, or the file of another user
            pass
        return True

    def put(self, name: bytes, data: memoryview) -> None:
        path = self._path(name)
        if os.path.lexists(path) or not self._room.reserve(len(data)):
            return
        try:
            self._write_whole(path, data)
        except OSError as error:
            if error.errno not in FULL or not self._room.free(2 * len(data)):
                raise
            self._write_whole(path, data)

    def discard(self, name: bytes) -> None:
        path = Path(self._path(name))
        try:
            path.unlink(missing_ok=True)  # its bytes count until the folder is listed again
        except IsADirectoryError:
            path.rmdir()

    def close(self) -> None:
        self._room.close()

    def _write_whole(self, path: str, data: memoryview) -> None:
        temporary = f"{path}.{secrets.token_hex(8)}.tmp"
        try:
            self._write(temporary, data)
            self._room.place(temporary, path, len(data))
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

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
            if error.errno != EINVAL or not self._direct:
                raise
            self._direct = 0
            return os.open(path, flags, 0o600)


def _is_own(path: str) -> bool:
    try:
        return os.stat(path, follow_symlinks=False).st_uid == os.geteuid()
    except OSError:
        return False
