"""Reads the defaults in a model's generation_config.json: sampling parameters and end tokens.

As in vLLM, the fields of this file replace the defaults of `SamplingParams`. Its `max_new_tokens` becomes `max_tokens`. Its
`do_sample` is ignored. A caller who wants the most probable token at each position sets temperature=0.
"""

import logging
from collections.abc import Mapping
from typing import Any

from inflight.config.architecture import ModelArchitecture
from inflight.errors import ConfigError, InvalidRequestError
from inflight.sampling_params import SamplingParams
from inflight.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def default_sampling_params(generation_config: Mapping[str, Any] | None) -> SamplingParams:  # Any: JSON
    """Returns the parameters for a request that comes without `SamplingParams`.

    Raises:
        ConfigError: a value in generation_config.json is not allowed.
    """
    given = generation_config or {}
    values = {ours: given[theirs] for theirs, ours in _FIELDS.items() if given.get(theirs) is not None}
    try:
        return SamplingParams(**values)
    except InvalidRequestError as error:
        raise ConfigError(
            f"generation_config.json: {error}; correct it with override_generation_config, or ignore it with "
            "generation_config='none'"
        ) from error


def warn_of_unknown_fields(overrides: Mapping[str, Any]) -> None:  # Any: JSON
    """Log the names in `override_generation_config` that have no effect."""
    if unknown := [name for name in overrides if name not in {*_FIELDS, "eos_token_id"}]:
        logger.warning("override_generation_config: these fields have no effect: %s", ", ".join(map(repr, unknown)))


def eos_token_ids(generation_config: Mapping[str, Any] | None) -> frozenset[int]:
    """Returns the end tokens in generation_config.json. The set may be empty.

    Raises:
        ConfigError: the end tokens are not token ids.
    """
    found = (generation_config or {}).get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None or found == -1 else [found]
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0 for token_id in ids):
        raise ConfigError(f"generation_config.json: eos_token_id={found!r} must be a token id or a list of token ids")
    return frozenset(ids)


def model_eos_token_ids(
    architecture: ModelArchitecture, tokenizer: Tokenizer | None, generation_config: Mapping[str, Any] | None
) -> frozenset[int]:
    """Returns all end tokens that the model's config.json, its tokenizer and its generation_config.json name. Ids outside the
    vocabulary are left out."""
    own = {tokenizer.eos_token_id} if tokenizer is not None else set()
    ids = {*architecture.eos_token_ids, *eos_token_ids(generation_config), *own}
    return frozenset(i for i in ids if i is not None and i < architecture.vocab_size)
