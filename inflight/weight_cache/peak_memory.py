"""`peak_bytes`: the peak memory of a model's largest step. An engine measures it before it allocates its KV cache. This takes
longer than mapping the weights, so the next engines with the same packed file and settings read what the first has measured.

    KEY.peaks   JSON: digest of the settings -> bytes. It is removed with the entry's other files
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from inflight.weight_cache.folder import PEAKS, CacheFolder, UnusableFolderError
from inflight.weight_cache.identity import digest_of_rooms
from inflight.weight_cache.place import cache_path

logger = logging.getLogger(__name__)

# The code that decides how much memory a step takes, besides what the key of the entry stands for.
_ROOMS = ("attention", "device", "sample", "spec_decode", "worker")
_MOST_SETTINGS = 32  # the newest are kept
_MOST_BYTES = 2**50


def peak_bytes(key: str, settings: object, measure: Callable[[], int]) -> int:
    """Returns the bytes that an earlier engine has measured, or those that `measure` returns.

    Args:
        key: of the packed file that the weights are mapped from; "": they are not mapped, so nothing is read or kept.
        settings: everything that decides how large a step can be. Its `repr` is compared.
    """
    path = cache_path()
    if not key or path is None:
        return measure()
    folder = CacheFolder(path)
    digest = hashlib.sha256(repr((digest_of_rooms(_ROOMS), settings)).encode()).hexdigest()[:40]
    known = _read(folder, key)
    if digest in known:
        return known[digest]
    measured = measure()
    newest = dict(list(known.items())[1 - _MOST_SETTINGS :])
    try:
        folder.check()
        _write(folder.file(key, PEAKS), {**newest, digest: measured})
    except (OSError, UnusableFolderError) as error:
        logger.info("the peak memory of a step is measured at the next start, too: %s", error)
    return measured


def _read(folder: CacheFolder, key: str) -> Mapping[str, int]:
    """Empty if there is no file, or if it cannot be read."""
    opened = folder.open(key, PEAKS)
    if opened is None:
        return {}
    with open(opened, "rb") as file:
        try:
            known = json.loads(file.read())
        except (OSError, ValueError, RecursionError):
            return {}
    are_sizes = isinstance(known, dict) and all(
        type(value) is int and 0 <= value < _MOST_BYTES for value in known.values()
    )
    return known if are_sizes else {}


def _write(path: Path, known: Mapping[str, int]) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    opened = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(opened, "w") as file:
            json.dump(known, file)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
