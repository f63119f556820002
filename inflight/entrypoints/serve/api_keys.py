"""The API keys: how they are read from a file, and how they are compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from inflight.errors import ConfigError

_MAX_FILE_BYTES = 2**20


def read_key_file(path: Path) -> tuple[str, ...]:
    """One key a line; empty lines and lines that begin with # are left out.

    Raises:
        ConfigError: the file cannot be read, or holds no key: without a key the server would let everybody in. No message
            quotes a key.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        lines = content.decode("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"api_key_file={str(path)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"api_key_file={str(path)!r} is not UTF-8 text") from error
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"api_key_file={str(path)!r} is larger than {_MAX_FILE_BYTES} bytes")
    keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
    if not keys:
        raise ConfigError(f"api_key_file={str(path)!r} holds no key")
    return keys


class ApiKeys:
    """Holds digests only. The time that `accepts` takes depends on the number of keys and the length of `shown` alone."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accepts(self, shown: bytes) -> bool:
        digest = _digest(shown)
        found = False
        for known in self._digests:  # all of them, always
            found |= hmac.compare_digest(known, digest)
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
