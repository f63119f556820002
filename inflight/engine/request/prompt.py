"""The forms in which a caller gives a prompt: text, token ids, or a dictionary with one of them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NotRequired, cast

import numpy as np

from inflight.engine.request.prepared_prompt import PreparedPrompt
from inflight.errors import InvalidRequestError
from inflight.interface.image_prompts import ImagesOfPrompt
from inflight.interface.request import Int32Array


class TextPrompt(ImagesOfPrompt):
    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(ImagesOfPrompt):
    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


_KEYS = ("prompt", "prompt_token_ids", "cache_salt", *ImagesOfPrompt.__annotations__)

Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | PreparedPrompt


def open_prompt(prompt: Prompt, cache_salt: str) -> tuple[object, str]:
    """Returns the text or the token ids, which are not checked yet, and the cache salt. If the prompt has no salt of its own,
    its salt is `cache_salt`.

    Raises:
        InvalidRequestError: a dictionary is not a valid prompt, or the salt is not a string.
    """
    given: object = prompt
    salt: object = cache_salt
    if isinstance(prompt, Mapping):
        given, salt = _open_dict(prompt), prompt.get("cache_salt", salt)
    if not isinstance(salt, str):
        raise InvalidRequestError(f"cache_salt={salt!r} must be a string", "cache_salt")
    return given, salt


def _open_dict(prompt: Mapping[str, object]) -> object:
    """Returns the text or the token ids in the dictionary."""
    if unknown := sorted(str(key) for key in prompt if key not in _KEYS):
        raise InvalidRequestError(f"unknown key {unknown[0]!r} in the prompt; known are {', '.join(map(repr, _KEYS))}")
    if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
        raise InvalidRequestError("a dict prompt must have either 'prompt' (text) or 'prompt_token_ids', and not both")
    if "prompt" in prompt and not isinstance(prompt["prompt"], str):
        raise InvalidRequestError(f"'prompt' is a {type(prompt['prompt']).__name__}; it must be text")
    if isinstance(prompt.get("prompt_token_ids"), str):
        raise InvalidRequestError("'prompt_token_ids' is text; give it as 'prompt'")
    return prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]


def as_list(given: object) -> list[object] | None:
    """Returns the entries of a list, a tuple, a generator, or a column of another library (a Series, an array, a tensor) as
    plain Python values. Returns None if `given` is something else, or if its entries have no order or are not its values.

    A text, bytes and a dictionary are not lists. Nor is a set, which has no order. Nor is a table, such as a DataFrame, whose
    iterator returns the names of its columns.
    """
    if isinstance(given, list | tuple | range):
        return list(given)
    if isinstance(given, str | bytes | bytearray | memoryview | Mapping | set | frozenset | type):
        return None
    if hasattr(type(given), "columns"):
        return None
    for name in ("tolist", "to_list", "to_pylist"):  # numpy, torch and pandas; polars; pyarrow
        if callable(convert := getattr(given, name, None)):
            values = convert()
            return values if isinstance(values, list) else None  # an array without dimensions returns its value
    return list(given) if isinstance(given, Iterable) else None


def as_token_ids(given: object) -> Sequence[int]:
    """Returns `given` if it is a non-empty sequence or array. Its elements are not checked yet.

    Raises:
        InvalidRequestError: `given` is something else, or empty.
    """
    token_ids = given if isinstance(given, list | np.ndarray) else as_list(given)
    if token_ids is None:
        raise InvalidRequestError(
            f"a prompt must be text, a list of token ids, {{'prompt': ...}} or {{'prompt_token_ids': ...}}; "
            f"this one is a {type(given).__name__}"
        )
    if len(token_ids) == 0:
        raise InvalidRequestError("the prompt is empty; give at least one token", "prompt")
    return cast("Sequence[int]", token_ids)


def token_array(token_ids: Sequence[int], vocab_size: int) -> Int32Array:
    """Returns the token ids as an array.

    Raises:
        InvalidRequestError: an id is not a token of the vocabulary. The message contains its position.
    """
    # This check has no Python loop, so a long prompt does not block other threads. The loop below only finds the wrong token.
    is_valid = set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size
    for position, token_id in enumerate(() if is_valid else token_ids):
        if isinstance(token_id, (bool, np.bool_)) or not isinstance(token_id, (int, np.integer)):
            raise InvalidRequestError(f"prompt token {token_id!r} at position {position} is not an integer", "prompt")
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"prompt token {token_id} at position {position} is outside the vocabulary of {vocab_size} tokens",
                "prompt",
            )
    return np.array(token_ids, dtype=np.int32)
