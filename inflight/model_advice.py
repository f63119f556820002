"""What to do if a model is not found, or is not whole: names that are near, models below a folder, unfinished downloads."""

import difflib
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_MAX_ENTRIES = 1000  # of a folder are looked at
_MAX_SHOWN = 3
_HUB_PREFIX = "models--"
_UNFINISHED = ("*.incomplete", "*.part", "*.crdownload", "*.aria2")  # files of programs that download


def near_models(name: str) -> str:
    """Returns "; did you mean ..." with names that are near: folders and files beside the path, and models in the hub's cache.
    If a program has begun to download the file itself, the text says this. Returns "" if there is nothing to say."""
    path = Path(os.path.expanduser(name))
    for pattern in _UNFINISHED:
        begun = path.with_name(f"{path.name}{pattern.removeprefix('*')}")
        if os.path.isfile(begun):
            return f"; its download is unfinished, because there is {begun.name}"
    beside = {
        entry.name: str(Path(name).parent / entry.name) for entry in _entries(path.parent) if _may_be_model(entry)
    }
    known = {**{each.rpartition("/")[2]: each for each in cached_models()}, **beside}
    by_lower_case = {each.lower(): each for each in known}
    wanted = path.name.lower()
    found = difflib.get_close_matches(wanted, by_lower_case, n=_MAX_SHOWN)
    found += [each for each in by_lower_case if wanted and each.startswith(wanted) and each not in found]
    return _or_nothing("; did you mean ", [known[by_lower_case[each]] for each in found])


def models_below(folder: Path) -> str:
    """Returns "; it contains models ..." if folders below this one are models. Returns "" if there are none."""
    if folder.name.startswith(_HUB_PREFIX):
        return f"; it is a folder of the hub's cache: give the hub id {_hub_id(folder)!r}"
    found = [str(entry) for entry in _entries(folder) if (entry / "config.json").is_file()]
    found += [str(entry) for entry in _entries(folder) if entry.suffix == ".gguf"]
    cached = [_hub_id(entry) for entry in _entries(folder) if entry.name.startswith(_HUB_PREFIX)]
    return _or_nothing("; models in it: ", found + cached)


def unfinished_download(folder: Path) -> str:
    """Returns "; its download is unfinished ..." if a program has begun to download into this folder and not ended. Returns ""
    if there is no sign of it. `folder` may be a snapshot in the hub's cache."""
    repository = folder.parent.parent
    is_cached = folder.parent.name == "snapshots" and repository.name.startswith(_HUB_PREFIX)
    places = [repository / "blobs"] if is_cached else [folder, folder / ".cache" / "huggingface" / "download"]
    files = [file for place in places for pattern in _UNFINISHED for file in _glob(place, pattern)]
    if not files:
        return ""
    again = f"`hf download {_hub_id(repository)}`" if is_cached else "the command that downloads it"
    return f"; its download is unfinished, because there is {files[0].name}: run {again} again"


def cached_models() -> list[str]:
    """The ids of the models in the hub's cache."""
    return sorted(_hub_id(entry) for entry in _entries(_hub_cache()) if entry.name.startswith(_HUB_PREFIX))


def _hub_cache() -> Path:
    """The folder that the hub library uses, as its documentation says."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(variable):
            return Path(value).expanduser()
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(home).expanduser() / "hub"


def _hub_id(folder: Path) -> str:
    return folder.name.removeprefix(_HUB_PREFIX).replace("--", "/")


def _may_be_model(entry: Path) -> bool:
    return entry.suffix == ".gguf" or (entry / "config.json").is_file()


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(itertools.islice(folder.iterdir(), _MAX_ENTRIES))
    except OSError:  # there is no such folder, or it may not be read
        return []


def _glob(folder: Path, pattern: str) -> Iterator[Path]:
    return itertools.islice(folder.glob(pattern), 1)


def _or_nothing(beginning: str, names: Iterable[str]) -> str:
    shown = list(dict.fromkeys(names))[:_MAX_SHOWN]
    return beginning + " or ".join(repr(name) for name in shown) if shown else ""
