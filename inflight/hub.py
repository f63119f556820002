"""Finds a model's files: in the installation (the small embedded model), a folder, a GGUF file, or on the Hugging Face hub."""

import contextlib
import glob
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, TypeVar

from inflight.errors import ConfigError, ModelNotFoundError
from inflight.model_advice import models_below, near_models, unfinished_download
from inflight.model_name import is_local

AnyPath = TypeVar("AnyPath", bound=PurePath)

EMBEDDED_MODEL = Path(__file__).parent / "demo" / "model"

GGUF_SUFFIX = ".gguf"
LIST_SECONDS = 10.0  # how long the hub may be silent, and how long it may take to list the files of a repository
# Only these files and the weights in safetensors are downloaded. Pickled weights (*.bin, *.pt) are never downloaded, and code
# only if the user asks for it.
_TOKENIZER_PATTERNS = ["*.json", "*.jinja"]
_INDEX = "model.safetensors.index.json"
# These are left out. Some repositories have the same model in other forms too: that of its authors (consolidated.safetensors,
# original/), ONNX, ...
_OTHER_CONFIGS = ["*/*.json"]
MMPROJ = "mmproj"  # what the names of files for images begin with, beside a GGUF file
_OTHER_WEIGHTS = ["*/*", "consolidated*"]
_CODE_PATTERNS = ["*.py"]
_PART_OF_A_MODEL = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")


def resolve_model_folder(model: str | None, revision: str | None = None, *, with_code: bool = False) -> Path:
    """Returns the model's folder, or its GGUF file. `with_code`: download the Python files of a hub id, too.

    If `model` is None, this is the embedded model. Otherwise `model` is an existing folder, a GGUF file, a hub id ("org/name"),
    or one GGUF file of a hub repository: "org/name:FILE.gguf", or "org/name:Q4_K_M" for the only file with Q4_K_M in its name.
    If a folder contains one GGUF file and no safetensors, the result is this file. If a model is split over several GGUF files,
    the result is the first; of the hub, all are downloaded. The hub library reads HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.

    Raises:
        ModelNotFoundError: there is no such folder, file or hub id, or it contains neither a config.json nor one GGUF file.
    """
    patterns = _TOKENIZER_PATTERNS + (_CODE_PATTERNS if with_code else [])
    if model is None:
        folder = EMBEDDED_MODEL
        what = "the embedded model (its files are missing from this installation)"
    elif (file := Path(os.path.expanduser(model))).suffix == GGUF_SUFFIX and os.path.isfile(file):
        return file
    elif not is_local(model) and ":" in model and _is_hub_id(model.partition(":")[0]):
        return _resolve_gguf_of_hub(model, revision)
    else:
        folder = _resolve(model, revision, patterns)
        what = f"model={model!r}"
        if not is_local(model):
            _download(model, revision, _weight_files(folder), ignored=_OTHER_WEIGHTS)
            if modules := _module_files(folder):
                _download(model, revision, modules)
    found = (file for file in folder.glob(f"*{GGUF_SUFFIX}") if file.is_file())
    gguf_files = without_later_parts(sorted(file for file in found if not file.name.startswith(MMPROJ)))
    if gguf_files and not any(folder.glob("*.safetensors")):
        if len(gguf_files) > 1:
            names = ", ".join(file.name for file in gguf_files)
            separator = "/" if model is None or is_local(model) else ":"
            raise ModelNotFoundError(
                f"{what} holds several GGUF files ({names}); name the one to serve as '{model}{separator}FILE.gguf'"
            )
        return gguf_files[0]
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
            raise ModelNotFoundError(
                f"{what} is an adapter (LoRA), not a whole model: {folder} has adapter_config.json and no config.json; merge "
                f"it into its base model, or give the base model{f', {base!r}' if isinstance(base, str) else ''}"
            )
        more = f" (looked in {folder}){unfinished_download(folder) or models_below(folder)}"
        if model is not None and not is_local(model):
            gguf_names, _ = _gguf_files_of_hub(model, revision)
            more += (
                f"; it has GGUF files, give one as '{model}:FILE.gguf': {', '.join(gguf_names)}" if gguf_names else ""
            )
        raise ModelNotFoundError(f"{what} is not a model folder: it holds no config.json{more}")
    return folder


def resolve_without_weights(model: str | None, revision: str | None = None) -> Path:
    """As `resolve_model_folder`. But of a hub id without a file only the small files are downloaded, without the weights.

    Raises:
        ConfigError: there is no such model, or its config.json cannot be read.
    """
    if model is None or is_local(model) or ":" in model:
        return resolve_model_folder(model, revision)
    folder = resolve_tokenizer_folder(model, revision)
    read_config(folder)
    return folder


def resolve_gguf_file(name: str, revision: str | None = None) -> Path:
    """Returns a GGUF file on the disk, or downloads one of a hub repository ("org/name:FILE.gguf").

    Raises:
        ModelNotFoundError: there is no such file.
    """
    file = Path(os.path.expanduser(name))
    if os.path.isfile(file):
        return file
    if ":" in name and _is_hub_id(name.partition(":")[0]):
        return _resolve_gguf_of_hub(name, revision)
    raise ModelNotFoundError(
        f"there is no file {name!r}; give a *.gguf file, or 'org/name:FILE.gguf' for one on the hub"
    )


def check_model_name(model: str | None) -> None:
    """Refuse a model that does not exist on this machine and whose name has not the form of a hub id. The hub is not asked.

    Raises:
        ModelNotFoundError: the model is refused.
    """
    is_path = model is None or is_local(model)
    if model is not None and not is_path and not _is_hub_id(model.partition(":")[0]):
        _resolve(model, None, [])


def resolve_tokenizer_folder(tokenizer: str, revision: str | None = None) -> Path:
    """Returns the folder of a tokenizer: an existing folder, or the downloaded files of a hub id without its weights. The
    folder needs no config.json."""
    return _resolve(tokenizer, revision, _TOKENIZER_PATTERNS)


def _resolve(name: str, revision: str | None, patterns: list[str]) -> Path:
    folder = Path(os.path.expanduser(name))
    if os.path.isdir(folder):
        return folder
    if is_local(name):
        raise ModelNotFoundError(
            f"{name!r} is a file; give the folder that holds it, {str(Path(name).parent)!r}, or a *.gguf file"
        )
    if not _is_hub_id(name):
        raise ModelNotFoundError(
            f"there is no folder {name!r}{near_models(name)}; give one that exists, a hub id like 'org/name' ("
            "with ':FILE.gguf' for one of its GGUF files), or leave model out for the embedded model"
        )
    return _download(name, revision, patterns, ignored=_OTHER_CONFIGS)


def _is_hub_id(model: str) -> bool:
    """Whether the text has the form `org/name`. A text that can only be a path, such as "./name", is not a hub id."""
    parts = model.split("/")
    return len(parts) == 2 and all(part.strip(".~") for part in parts) and "\\" not in model and model[0] not in "./~"


def _resolve_gguf_of_hub(model: str, revision: str | None) -> Path:
    """Returns the file that `model` names: "org/name:FILE.gguf", or "org/name:TAG" with a part of the file's name. If this is
    the first part of a split model, all parts are downloaded. No other file is."""
    repository, _, wanted = model.partition(":")
    names, where = _gguf_files_of_hub(repository, revision)
    whole = [
        path.as_posix() for path in without_later_parts(map(PurePosixPath, names)) if not path.name.startswith(MMPROJ)
    ]
    chosen = [name for name in names if name == wanted] or [name for name in whole if has_tag(name, wanted)]
    if len(chosen) != 1:
        what = f"{len(chosen)} GGUF files with {wanted!r} in their names" if chosen else f"no GGUF file {wanted!r}"
        raise ModelNotFoundError(
            f"model={model!r}: {where} has {what}; give one of its GGUF files as '{repository}:FILE.gguf': "
            f"{', '.join(whole) or 'there are none'}"
        )
    [name] = chosen
    parts = gguf_parts(PurePosixPath(name))
    if parts[0].as_posix() != name:
        raise ModelNotFoundError(
            f"model={model!r}: {name} is one of {len(parts)} parts of a model; give the first part, '{repository}:{parts[0]}'"
        )
    missing = [part.as_posix() for part in parts if part.as_posix() not in names]
    if missing:
        raise ModelNotFoundError(
            f"model={model!r}: {name} is the first of {len(parts)} parts of a model, but {where} lacks {', '.join(missing)}"
        )
    return _download(repository, revision, [glob.escape(str(part)) for part in parts]) / name


def has_tag(name: str, tag: str) -> bool:
    """Whether the tag is a whole word of the name: Q4_K is not in a name with Q4_K_M, and Q4_K_M not in one with IQ4_K_M."""
    return re.search(rf"(?<![a-z0-9]){re.escape(tag)}(?![a-z0-9_])", name, re.IGNORECASE) is not None


def gguf_parts(path: AnyPath) -> list[AnyPath]:
    """The files over which a model is split, if `path` is called as one of them: NAME-00001-of-00003.gguf and so on. Otherwise
    only `path`."""
    part = _PART_OF_A_MODEL.fullmatch(path.name)
    count = int(part[3]) if part is not None else 0
    if part is None or not 1 <= int(part[2]) <= count:
        return [path]
    names = (f"{part[1]}-{number:05}-of-{count:05}{GGUF_SUFFIX}" for number in range(1, count + 1))
    return [path.with_name(name) for name in names]


def without_later_parts(files: Iterable[AnyPath]) -> list[AnyPath]:
    """Of each split model only the first part that is there. If this is a later part, reading it says what is missing."""
    found = dict.fromkeys(files)
    return [file for file in found if next(part for part in gguf_parts(file) if part in found) == file]


def _gguf_files_of_hub(repository: str, revision: str | None) -> tuple[list[str], str]:
    """Returns the names of the repository's GGUF files, and where they were found: on the hub, or in the hub's local cache if
    the hub cannot be reached."""
    from huggingface_hub import model_info  # optional at run time; `list_repo_files` would retry for 24 s

    try:
        found = model_info(repository, revision=revision, timeout=LIST_SECONDS).siblings or []
        names = [file.rfilename for file in found]
        where = repository
    except Exception:  # the hub cannot be reached, or refuses: use the cache; without a cache `_download` raises
        folder = _download(repository, revision, [])
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        where = f"the hub's cache of {repository} (the hub itself could not be asked{unfinished_download(folder)})"
    return sorted(name for name in names if name.endswith(GGUF_SUFFIX)), where


def can_download(model: str, revision: str | None) -> bool:
    """Whether the hub can be reached, and has the model."""
    from huggingface_hub import model_info  # optional at run time

    try:
        model_info(model, revision=revision, timeout=LIST_SECONDS)
    except Exception:  # no network, offline mode, no such model, no permission: nothing can be downloaded
        return False
    return True


def _weight_files(folder: Path) -> list[str]:
    """Patterns for the files of weights: those that the index names, or all safetensors if there is no index."""
    listed = read_json(folder / _INDEX).get("weight_map") if (folder / _INDEX).is_file() else None
    files = listed.values() if isinstance(listed, dict) else ()
    return sorted({glob.escape(name) for name in files if isinstance(name, str)}) or ["*.safetensors"]


def _module_files(folder: Path) -> list[str]:
    """Patterns for the files of the modules of sentence-transformers, which have folders of their own."""
    try:
        given = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        paths = [str(entry["path"]) for entry in given if entry["path"]]
    except (OSError, ValueError, KeyError, TypeError):  # there are none, or the file is refused later, by name
        return []
    return [f"{glob.escape(path)}/{name}" for path in paths for name in ("config.json", "model.safetensors")]


def _download(model: str, revision: str | None, patterns: list[str], *, ignored: Sequence[str] = ()) -> Path:
    from huggingface_hub import constants, snapshot_download  # optional at run time: a local folder needs no hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    which = repr(model) + (f" at revision {revision!r}" if revision else "")
    silence = f"{constants.ENDPOINT} has not answered for {LIST_SECONDS:g} s"
    # `from None`: the hub library's own chain of errors says nothing more, but is long
    try:
        with _limited_silence():
            found = snapshot_download(model, revision=revision, allow_patterns=patterns, ignore_patterns=[*ignored])
        return Path(found)
    except HFValidationError:
        raise ModelNotFoundError(f"{model!r} is neither an existing folder nor a valid hub id") from None
    except GatedRepoError:
        raise ModelNotFoundError(f"{which} is gated: accept its terms on the hub, then set HF_TOKEN") from None
    except RevisionNotFoundError:
        raise ModelNotFoundError(f"the hub has no {which}: check the branch, tag or commit") from None
    except RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"there is no folder {model!r}, and the hub has no such model (or it is private: set HF_TOKEN){near_models(model)}"
        ) from None
    except LocalEntryNotFoundError as error:
        why = silence if _is_timeout(error.__cause__) else "no network, or HF_HUB_OFFLINE is set"
        raise ModelNotFoundError(
            f"there is no folder {model!r}, it is not in the hub's cache, and the hub cannot be reached ({why}): download it "
            f"first, or give a local folder{near_models(model)}"
        ) from None
    except OSError as error:  # connection errors and a full disk are OSErrors too
        raise ModelNotFoundError(f"{which} could not be downloaded from the hub: {error}") from None
    except Exception as error:  # the library has not found in the answer what it takes for granted
        if _is_timeout(error):
            raise ModelNotFoundError(f"{which} could not be downloaded: {silence}") from None
        raise ModelNotFoundError(
            f"{which} could not be downloaded: the hub's answer, or that of a proxy before it, cannot be read "
            f"({type(error).__name__}: {error})"
        ) from None


@contextlib.contextmanager
def _limited_silence() -> Iterator[None]:
    """The hub library sets no limit for some of its requests, so it would wait for ever for a hub that accepts a connection and
    sends nothing. In this context requests of this thread get a limit. Other threads may send what takes long."""
    from huggingface_hub import get_session

    owner = threading.get_ident()

    def limit(request: Any) -> None:  # Any: the request of the library's HTTP client, httpx or httpx2
        if threading.get_ident() == owner:
            times = request.extensions.get("timeout", {})
            request.extensions["timeout"] = {
                name: LIST_SECONDS if seconds is None else seconds for name, seconds in times.items()
            }

    hooks = get_session().event_hooks["request"]
    hooks.append(limit)
    try:
        yield
    finally:
        hooks.remove(limit)


def _is_timeout(error: BaseException | None) -> bool:
    """Whether the hub library's HTTP client has waited too long. Which client it uses depends on the library's version."""
    return "Timeout" in type(error).__name__


def read_json(path: Path) -> dict[str, Any]:  # Any: JSON, checked where each field is read
    """The JSON object in `path`.

    Raises:
        ConfigError: there is no such file, or it holds something other than a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `config.json`, which every model folder has."""
    return read_json(folder / "config.json")


def read_generation_config(folder: Path) -> dict[str, Any] | None:
    """The content of `generation_config.json`; None if the folder has no such file."""
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else None
