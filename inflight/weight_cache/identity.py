"""How a packed file is recognised: the identity of the model's files from which it was made, and the key of its entry.

A packed file must never be used for other weights. Reading a whole model to hash it takes as long as loading it, so its files
are known by what the file system says. The time of the last change of an inode (`ctime`) cannot be set by a program: it changes
with every write, even if the size and the modification time are set back. Two changes within one tick of the file system's
clock have the same time, though. So files that changed a moment ago are not cached (`SETTLED_SECONDS`); git does the same with
its index. Samples of the contents are compared, too, because on some network file systems the numbers and times of inodes are
not real.
"""

import hashlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from inflight.version import __version__

SETTLED_SECONDS = 2.0  # the coarsest clock of a file system (FAT)
_SAMPLE_BYTES = 4096
_NUM_SAMPLES = 16
_HEADER_BYTES = 65536
# The code that decides what is packed, and how. Its digest is the version of the layout.
_ROOMS = ("config", "kernels", "layers", "model_loader", "models", "weight_cache")


@dataclass(frozen=True)
class FileIdentity:
    """What the file system says about a file. Times are in nanoseconds."""

    num_bytes: int
    inode: int
    modified_ns: int
    changed_ns: int


def identity_of(status: os.stat_result) -> FileIdentity:
    return FileIdentity(status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True)
class ModelFiles:
    """The files with a model's weights, as they were at one moment.

    `are_settled`: none of them changed in the last moment, so any later change will be seen.
    """

    identities: tuple[tuple[str, FileIdentity], ...]
    sampled: str
    are_settled: bool


def read_identities(files: Iterable[Path]) -> ModelFiles:
    """
    Raises:
        OSError: a file cannot be read.
    """
    now = time.time()
    identities = list[tuple[str, FileIdentity]]()
    contents = hashlib.sha256()
    for path in sorted(files):
        with open(path, "rb", buffering=0) as file:
            identity = identity_of(os.fstat(file.fileno()))
            contents.update(os.pread(file.fileno(), _HEADER_BYTES, 0))
            for offset, num_bytes in sample_places(identity.num_bytes, _NUM_SAMPLES):
                contents.update(os.pread(file.fileno(), num_bytes, offset))
        identities.append((path.name, identity))
    newest = max(max(each.changed_ns, each.modified_ns) for _, each in identities) / 1e9
    return ModelFiles(tuple(identities), contents.hexdigest(), newest + SETTLED_SECONDS < now)


def sample_places(num_bytes: int, num_samples: int) -> list[tuple[int, int]]:
    """(offset, size) of places that are spread over a file, the first and the last bytes among them."""
    if num_bytes <= num_samples * _SAMPLE_BYTES:
        return [(0, num_bytes)]
    last = num_bytes - _SAMPLE_BYTES
    return [(last * index // (num_samples - 1), _SAMPLE_BYTES) for index in range(num_samples)]


def key_of(files: ModelFiles, *made_by: object) -> str:
    """The name of an entry. `made_by`: everything else that the contents of the packed file depend on, compared by `repr`."""
    text = repr((__version__, digest_of_rooms(_ROOMS), files.identities, files.sampled, *made_by))
    return hashlib.sha256(text.encode()).hexdigest()[:40]


@cache
def digest_of_rooms(rooms: tuple[str, ...]) -> str:
    """A digest of the Python code of these folders of the package."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for room in rooms:
        for path in sorted((package / room).rglob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
