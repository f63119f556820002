"""`KeptChoices`: what was measured as the fastest way of a product, kept in a file, so that the next start gives the same bits.

Two ways of a product add in another order, so they round differently. A start that measured again could choose another way, and
a request that goes on after a restart could draw other tokens than it would have drawn. There is one file for each kind of GPU
and each version of Triton, torch and Inflight. What a rank has written first holds for all later ones.
"""

import fcntl
import hashlib
import json
import logging
import os
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TypedDict

import torch

from inflight.version import __version__

logger = logging.getLogger(__name__)


class KeptChoice(TypedDict):
    """`tile`: the fields of the `TileConfig`; None for torch's library."""

    tile: dict[str, int] | None
    microseconds: float
    library_microseconds: float


Choices = dict[str, KeptChoice]  # by a text that names the weight, the dtypes and the number of rows


class KeptChoices:
    """
    Args:
        path: the file, in JSON. It may be missing. None: nothing is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self) -> Choices:
        """The kept choices; none if the file is missing or damaged."""
        if self._path is None:
            return {}
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {name: each for name, each in found.items() if _is_choice(each)} if isinstance(found, dict) else {}

    def agree(self, measured: Choices, read: Choices) -> Choices:
        """Adds new choices to the file, and returns those that hold for their names: another rank may have been first. A new
        choice replaces one that `read` has returned, because that one does not run here any more."""
        if self._path is None or not measured:
            return measured
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                others = {name: each for name, each in self.read().items() if each != read.get(name)}
                held = {**read, **measured, **others}
                new = self._path.with_suffix(f".{os.getpid()}")
                new.write_text(json.dumps(held, indent=0, sort_keys=True), encoding="utf-8")
                new.replace(self._path)
        except OSError as error:
            logger.info("the fastest ways of products are not kept in %s: %s", self._path, error)
            return measured
        return {name: held[name] for name in measured}


def kept_choices(device: torch.device) -> KeptChoices:
    """The choices for GPUs as `device`, in `$XDG_CACHE_HOME/inflight` (`~/.cache/inflight`)."""
    properties = torch.cuda.get_device_properties(device)
    parts = (
        *(properties.name, properties.multi_processor_count, properties.major, properties.minor),
        *(torch.__version__, torch.version.cuda, version("triton"), __version__),
    )
    name = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    folder = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # there is no home folder
        return KeptChoices(Path(folder or Path.home() / ".cache") / "inflight" / f"products-{name}.json")
    return KeptChoices(None)


def _is_choice(found: object) -> bool:
    if not isinstance(found, dict) or not {"tile", "microseconds", "library_microseconds"} <= found.keys():
        return False
    tile = found["tile"]
    return tile is None or (isinstance(tile, dict) and all(isinstance(each, int) for each in tile.values()))
