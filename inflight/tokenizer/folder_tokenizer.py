"""`folder_tokenizer`: reads the tokenizer of a model's folder: tokenizer.json, and its special tokens from other files."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from inflight.errors import TokenizerError
from inflight.hub import read_json
from inflight.model_advice import unfinished_download
from inflight.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def folder_tokenizer(folder: Path, kind: type[Tokenizer] = Tokenizer) -> Tokenizer:
    """Read tokenizer.json, and the special tokens' names from tokenizer_config.json or special_tokens_map.json. `kind`: of what
    class the result is.

    Raises:
        TokenizerError: there is no tokenizer.json, or it cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        found = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (folder / name).is_file()]
        hint = f" ({', '.join(found)} alone cannot be read)" if found else ""
        raise TokenizerError(
            f"{folder} holds no tokenizer.json{hint}{unfinished_download(folder)}; name another folder or hub id with "
            "tokenizer=..., or serve token ids only with skip_tokenizer_init=True"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if getattr(backend.model, "dropout", None):  # for training: each time a text would have other tokens
        backend.model.dropout = None
    config = read_tokenizer_config(folder)
    _add_listed_tokens(backend, config, folder)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    extra = extra.values() if isinstance(extra, dict) else extra
    return kind(backend, read_special_tokens(config), [text for token in extra if (text := _content(token))])


def read_tokenizer_config(folder: Path) -> dict[str, Any]:  # Any: JSON, checked where each field is read
    """special_tokens_map.json, overridden by tokenizer_config.json; {} if there is neither."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file():
            merged |= {key: value for key, value in read_json(path).items() if value is not None}
    return merged


def read_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns name -> text for the special tokens in `config`. There each is written as text or as {"content": text, ...}."""
    return {name: text for name in SPECIAL_TOKEN_NAMES if (text := _content(config.get(name)))}


def _content(token: object) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _add_listed_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], folder: Path) -> None:
    """Add the tokens of tokenizer_config.json's `added_tokens_decoder` that tokenizer.json does not have, and give known ones
    the flags that it lists, as transformers does. A new token gets the next id that is free.

    Raises:
        TokenizerError: the list is malformed.
    """
    names = set(read_special_tokens(config).values())
    known = {token_id: _flags(token) for token_id, token in backend.get_added_tokens_decoder().items()}
    try:
        listed = {
            int(token_id): AddedToken(**{name: value for name, value in entry.items() if name in _TOKEN_FIELDS})
            for token_id, entry in (config.get("added_tokens_decoder") or {}).items()
        }
        if not all(token.content for token in listed.values()):
            raise ValueError("one has no content")
    except (TypeError, ValueError, AttributeError) as error:
        raise TokenizerError(
            f"added_tokens_decoder in {folder / 'tokenizer_config.json'} does not list tokens: {error}"
        ) from error
    new = [token for _, token in sorted(listed.items()) if _flags(token) not in known.values()]
    for token in new:
        token.special = token.special or token.content in names
    backend.add_tokens(new)
    moved = [token.content for i, token in listed.items() if backend.token_to_id(token.content) != i]
    if moved:
        logger.warning(
            "%s: tokenizer_config.json and tokenizer.json give different ids to %s; those of tokenizer.json, or the next free "
            "ones, are used",
            folder,
            ", ".join(map(repr, moved[:8])),
        )


def _flags(token: AddedToken) -> tuple[object, ...]:
    return tuple(getattr(token, name) for name in _TOKEN_FIELDS)
