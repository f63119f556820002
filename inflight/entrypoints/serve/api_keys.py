"""Reads API keys from a file, and compares the key of a request with them in constant time."""

import hashlib
import hmac
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from inflight.errors import ConfigError

MIN_KEY_LENGTH = 8


def read_key_file(path: Path) -> tuple[str, ...]:
    """Read a file with one key on each line. Empty lines and lines that begin with # are left out.

    Raises:
        ConfigError: the file cannot be read, has an unusable key, or has no key at all. A server without keys would let
            everybody in. No message contains a key.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"api_key_file={str(path)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"api_key_file={str(path)!r} is not UTF-8 text") from error
    keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
    if not keys:
        raise ConfigError(f"api_key_file={str(path)!r} holds no key")
    if problems := list(key_problems(keys)):
        raise ConfigError(f"api_key_file={str(path)!r}: {'; '.join(problems)}")
    return keys


def key_problems(keys: Sequence[str]) -> Iterator[str]:
    """Yields a message for each reason why these keys cannot be used. No message contains a key."""
    if any(len(key) < MIN_KEY_LENGTH for key in keys):
        yield f"an API key is shorter than {MIN_KEY_LENGTH} characters, and can be guessed: use a longer one"
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        yield "an API key has characters that a header cannot carry: use printable ASCII without blanks"


class ApiKeys:
    """The keys that are valid now, as digests. The time of `accepts` depends only on the number of keys and the length of
    `shown`.

    Args:
        keys: keys that are valid until the process ends.
        file: a file with further keys. `read_file_again` replaces the keys of the file only.

    Raises:
        ConfigError: see `read_key_file`.
    """

    def __init__(self, keys: Sequence[str], file: str | None = None) -> None:
        self._file = file
        self._given = [digest(key.encode()) for key in keys]
        self.read_file_again()

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accepts(self, shown: bytes) -> bool:
        wanted = digest(shown)
        found = False
        for known in self._digests:  # compare with all keys, so that the time does not show which key fits
            found |= hmac.compare_digest(known, wanted)
        return found

    def read_file_again(self) -> int:
        """Read the file again. Returns how many keys are valid now.

        Raises:
            ConfigError: see `read_key_file`. The same keys as before are valid.
        """
        keys = () if self._file is None else read_key_file(Path(os.path.expanduser(self._file)))
        self._digests = [*self._given, *(digest(key.encode()) for key in keys)]
        return len(self._digests)


def digest(key: bytes) -> bytes:
    """What the server keeps of a key."""
    return hashlib.sha256(key).digest()
