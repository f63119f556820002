"""`Catalog`: which models a name in a request can mean: sections of the preset file, a folder of models, the hub's cache."""

import contextlib
import difflib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from inflight.entrypoints.router.presets import ALL, Preset
from inflight.errors import ConfigError, ModelNotFoundError
from inflight.hub import GGUF_SUFFIX, MMPROJ, gguf_parts, without_later_parts
from inflight.hub_cache import cached_models
from inflight.model_name import is_local

LATEST = ":latest"  # Ollama's clients add this tag to names without one
_PART = "-00001-of-"
# What no name may have: control characters, and bytes that are not UTF-8, which Python shows as lone surrogates
_NOT_IN_NAMES = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


class NameOutsideError(ConfigError):
    """A name that is a path out of the folder of models."""


class FolderGoneError(ConfigError):
    """The folder of models could be read at the start, and cannot be read any more."""


@dataclass(frozen=True)
class KnownModel:
    """
    Attributes:
        name: the name by which requests ask for the model.
        model: as `inflight serve` takes it: a folder, a GGUF file, or a name on the hub.
        preset: its section of the preset file; a section without options if it has none.
        is_cached: whether it is in the hub's cache, and so can be deleted over HTTP.
        num_bytes: of its files; 0 if that is not known.
        modified: when a file of it was last written, in seconds since 1970; 0 if that is not known.
    """

    name: str
    model: str
    preset: Preset = field(default_factory=Preset)
    is_cached: bool = False
    num_bytes: int = 0
    modified: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which requests may ask for the model. The first is the one that answers have."""
        last = self.name.rpartition("/")[2]
        file = [f"{self.name}{GGUF_SUFFIX}"] if self.model.endswith(GGUF_SUFFIX) and ":" not in last else []
        return (self.name, *file, *([f"{self.name}{LATEST}"] if ":" not in last else []))

    @property
    def digest(self) -> str:
        """It changes when the files change. It is not a digest of their contents, which would take long to compute."""
        return hashlib.sha256(f"{self.model}\0{self.num_bytes}\0{self.modified}".encode()).hexdigest()


class Catalog:
    """
    Args:
        folder: the folder of models, or None.
        presets: the sections of the preset file, by name. "*" is for all models without a section of their own.
        has_cache: whether the models in the hub's cache are known, too.

    Raises:
        ConfigError: `folder` is no folder.
    """

    def __init__(self, folder: Path | None, presets: dict[str, Preset], *, has_cache: bool) -> None:
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"models_dir={str(folder)!r} is not a folder: give one with models in it")
        self._folder = folder
        self._presets = {name: preset for name, preset in presets.items() if name != ALL}
        self._for_all = replace(presets.get(ALL, Preset()), loads_on_startup=False, is_pinned=False)
        self._has_cache = has_cache

    def models(self) -> dict[str, KnownModel]:
        """By name. Reads the folder each time, because models may have been added or removed. If several models have one name,
        a section of the preset file goes before the folder, and the folder before the hub's cache.

        Raises:
            FolderGoneError: the folder cannot be read.
        """
        found = {}
        if self._has_cache:
            found = {
                each.name: KnownModel(
                    name=each.name,
                    # the name is what `inflight serve` takes, too
                    model=each.name,
                    preset=self._for_all,
                    is_cached=True,
                    num_bytes=each.num_bytes,
                    modified=each.modified,
                )
                for each in cached_models()
                if each.is_whole
            }
        if self._folder is not None:
            try:
                entries = sorted(self._folder.iterdir())
            except OSError as error:
                raise FolderGoneError(f"the folder of the models cannot be read: {error.strerror}") from None
            found |= {name: _known(name, path, self._for_all) for name, path in _models_in(entries)}
        for name, preset in self._presets.items():
            model = preset.model or (found[name].model if name in found else name)
            path = Path(os.path.expanduser(model))
            found[name] = _known(name, path, preset) if is_local(model) else KnownModel(name, model, preset)
        return found

    def find(self, name: str) -> KnownModel:
        """
        Raises:
            FolderGoneError: the folder cannot be read.
            NameOutsideError: the name is a path out of the folder.
            ModelNotFoundError: no model has this name.
        """
        models = self.models()
        for each in (name, name.removesuffix(LATEST), name.removesuffix(GGUF_SUFFIX)):
            if each in models:
                return models[each]
        if name.startswith(("/", "~", "\\")) or "\0" in name or ".." in name.replace("\\", "/").split("/"):
            raise NameOutsideError(
                f"model={name[:200]!r} is a path: give the name of a model, as /v1/models lists them"
            )
        near = difflib.get_close_matches(name[:200], models, 3)
        listed = f"; did you mean {' or '.join(map(repr, near))}?" if near else "; /v1/models lists the models"
        raise ModelNotFoundError(f"there is no model {name[:200]!r}{listed}")


def _known(name: str, path: Path, preset: Preset) -> KnownModel:
    stats = []
    with contextlib.suppress(OSError):  # a file has just gone, or only others may read it
        files = gguf_parts(path) if path.is_file() else [each for each in path.iterdir() if each.is_file()]
        stats = [each.stat() for each in files if each.exists()]
    return KnownModel(
        name=name,
        model=str(path),
        preset=preset,
        # folders of the user are not the cache, wherever they are
        is_cached=False,
        num_bytes=sum(each.st_size for each in stats),
        modified=max((each.st_mtime for each in stats), default=0.0),
    )


def _models_in(entries: Iterable[Path], prefix: str = "") -> Iterator[tuple[str, Path]]:
    """Names and paths. A model is a folder with config.json, a folder with a GGUF file, or a GGUF file. Of a folder
    without either, the folders in it are read, but not deeper, because hub ids have two parts (ORG/NAME). What cannot be read,
    and names that no request can have, are left out."""
    for path in entries:
        if path.name.startswith(".") or _NOT_IN_NAMES.search(path.name):
            continue
        with contextlib.suppress(OSError):
            yield from _models_at(path, prefix)


def _models_at(path: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    name = f"{prefix}{path.name}"
    if path.suffix == GGUF_SUFFIX and path.is_file():
        if _is_model(path):
            yield f"{prefix}{_stem(path)}", path
    elif path.is_dir():
        found = (
            each for each in path.glob(f"*{GGUF_SUFFIX}") if _is_model(each) and not _NOT_IN_NAMES.search(each.name)
        )
        ggufs = without_later_parts(sorted(found))
        if (path / "config.json").is_file():
            yield name, path
        elif len(ggufs) == 1:
            yield name, ggufs[0]
        elif ggufs:
            yield from ((f"{name}/{_stem(each)}", each) for each in ggufs)
        elif not prefix:
            yield from _models_in(sorted(path.iterdir()), f"{name}/")


def _is_model(path: Path) -> bool:
    """Whether a GGUF file is a model or its first part. An `mmproj` file, which has a model's vision tower, is not."""
    return not path.name.startswith(MMPROJ) and gguf_parts(path)[0] == path


def _stem(path: Path) -> str:
    """The name of a GGUF file without its ending and the number of its part."""
    return path.stem.partition(_PART)[0]
