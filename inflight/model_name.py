"""Reads the name of a model as people copy it: the address of a page on the Hugging Face hub, or "embedded"."""

import os
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from inflight.errors import ModelNotFoundError

EMBEDDED = "embedded"  # the name under which the small model of the package is served
_HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_OTHER_PAGES = ("datasets", "spaces", "docs", "papers", "collections", "blog", "models", "api", "learn")
_PAGES_OF_A_MODEL = ("tree", "blob", "resolve", "raw", "commit")  # behind ORG/NAME; a revision follows


class ModelName(NamedTuple):
    """What a name means. `model` is as `resolve_model_folder` takes it: None is the embedded model."""

    model: str | None
    revision: str | None = None


def is_local(name: str) -> bool:
    """Whether a file or folder has this name. No file has a name that is too long, or one below the home of an unknown user."""
    return os.path.exists(Path(os.path.expanduser(name)))  # of "", this is the current folder


def read_model_name(given: str) -> ModelName:
    """Returns what the name means. A name that exists as a file or folder stays as it is. So does each name that is no address.

        https://<hub>/Qwen/Qwen3-0.6B, hf.co/Qwen/Qwen3-0.6B                  Qwen/Qwen3-0.6B
        https://<hub>/Qwen/Qwen3-0.6B/tree/v1                                 Qwen/Qwen3-0.6B, revision v1
        https://<hub>/Qwen/Qwen3-0.6B-GGUF/blob/main/Qwen3-0.6B-Q8_0.gguf     Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf
        hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0                                       Qwen/Qwen3-0.6B-GGUF:Q8_0
        file:///models/my-model                                               /models/my-model
        embedded                                                              the model that is part of the package

    Raises:
        ModelNotFoundError: the address is none of a model.
    """
    text = given.strip()
    if not text or is_local(text):
        return ModelName(given)
    if text == EMBEDDED:
        return ModelName(None)
    scheme, mark, rest = text.partition("://")
    if mark and scheme.lower() == "file":
        return ModelName(unquote(urlsplit(text).path))
    if mark and scheme.lower() == "hf":
        return _of_hub(rest, given)
    host, _, path = (rest if mark else text).partition("/")
    if host.lower() in _hub_hosts():
        return _of_hub(path, given)
    if mark:
        raise ModelNotFoundError(
            f"{given!r} is no address on the Hugging Face hub: download the model, and give its folder or its GGUF file"
        )
    return ModelName(given)


def _hub_hosts() -> tuple[str, ...]:
    own = urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc
    return (*_HUB_HOSTS, own) if own else _HUB_HOSTS


def _of_hub(path: str, given: str) -> ModelName:
    """`path`: the part of the address behind the host."""
    parts = [unquote(part) for part in re.split(r"[?#]", path)[0].split("/") if part]
    if len(parts) < 2 or parts[0] in _OTHER_PAGES:
        raise ModelNotFoundError(
            f"{given!r} is no page of a model: give its hub id, such as 'Qwen/Qwen3-0.6B', or the address of its page"
        )
    model = "/".join(parts[:2])
    more = parts[2:]
    if len(more) < 2 or more[0] not in _PAGES_OF_A_MODEL:
        return ModelName(model)
    revision = None if more[1] == "main" else more[1]
    file = "/".join(more[2:])
    return ModelName(f"{model}:{file}" if file.endswith(".gguf") else model, revision)
