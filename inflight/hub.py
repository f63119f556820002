"""Where a model's files are: the embedded model, a folder, a GGUF file, or a snapshot of a Hugging Face hub repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError, ModelNotFoundError

EMBEDDED_MODEL = Path(__file__).parent / "demo" / "model"

GGUF_SUFFIX = ".gguf"
# What a model folder is read for. Never pickled weights (*.bin, *.pt), never code (*.py).
_TOKENIZER_PATTERNS = ["*.json", "*.jinja"]
_WEIGHTS_PATTERNS = ["*.safetensors"]


def resolve_model_folder(model: str | None, revision: str | None = None) -> Path:
    """The folder that holds the model: the embedded one for None, an existing folder, or a hub id's snapshot.

    A model that is one GGUF file is that file: named itself, or the only one in a folder without safetensors.
    The hub's cache, token and offline mode are set by its own variables (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE).

    Raises:
        ModelNotFoundError: there is no such folder or hub id, or it holds no config.json.
    """
    if model is None:
        folder, what = EMBEDDED_MODEL, "the embedded model (its files are missing from this installation)"
    elif (file := Path(model).expanduser()).suffix == GGUF_SUFFIX and file.is_file():
        return file
    else:
        folder, what = _resolve(model, revision, _TOKENIZER_PATTERNS + _WEIGHTS_PATTERNS), f"model={model!r}"
    gguf_files = sorted(folder.glob(f"*{GGUF_SUFFIX}"))
    if gguf_files and not any(folder.glob("*.safetensors")):
        if len(gguf_files) > 1:
            names = ", ".join(file.name for file in gguf_files)
            raise ModelNotFoundError(
                f"{what} holds several GGUF files ({names}); name the one to serve (a model split over several is not read)"
            )
        return gguf_files[0]
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{what} is not a model folder: it holds no config.json (looked in {folder})")
    return folder


def resolve_tokenizer_folder(tokenizer: str, revision: str | None = None) -> Path:
    """As `resolve_model_folder`, for a tokenizer of its own: no config.json is needed, no weights are fetched."""
    return _resolve(tokenizer, revision, _TOKENIZER_PATTERNS)


def _resolve(name: str, revision: str | None, patterns: list[str]) -> Path:
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelNotFoundError(f"{name!r} is a file; give the folder that holds it, or a *.gguf file")
    if not _is_hub_id(name):
        raise ModelNotFoundError(
            f"there is no folder {name!r}; give an existing one, a hub id like 'org/name', or leave model out for the "
            "embedded model"
        )
    return _download(name, revision, patterns)


def _is_hub_id(model: str) -> bool:
    """`org/name`, and nothing that can only be a path."""
    parts = model.split("/")
    return len(parts) == 2 and all(part.strip(".~") for part in parts) and "\\" not in model and model[0] not in "./~"


def _download(model: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download  # optional at run time: a local folder needs no hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    which = repr(model) + (f" at revision {revision!r}" if revision else "")
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except HFValidationError as error:
        raise ModelNotFoundError(f"{model!r} is neither an existing folder nor a valid hub id") from error
    except GatedRepoError as error:
        raise ModelNotFoundError(f"{which} is gated: accept its terms on the hub, then set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(f"the hub has no {which}: check the branch, tag or commit") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"there is no folder {model!r}, and the hub has no such model (or it is private: set HF_TOKEN)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelNotFoundError(
            f"there is no folder {model!r}, it is not in the hub's cache, and the hub cannot be reached (no network, or "
            "HF_HUB_OFFLINE is set): download it first, or give a local folder"
        ) from error
    except OSError as error:  # connection errors and a full disk are OSErrors too
        raise ModelNotFoundError(f"{which} could not be downloaded from the hub: {error}") from error


def read_json(path: Path) -> dict[str, Any]:  # Any: JSON, checked where each field is read
    """The JSON object in `path`.

    Raises:
        ConfigError: there is no such file, or it holds something else than a JSON object.
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
    """`config.json`, which every model folder has."""
    return read_json(folder / "config.json")


def read_generation_config(folder: Path) -> dict[str, Any] | None:
    """`generation_config.json`, or None where there is none."""
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else None
