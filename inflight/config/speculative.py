"""`speculative_config`, a dictionary of the user's, checked and completed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.config.engine import SpeculativeConfig
from inflight.errors import ConfigError

MAX_SPECULATIVE_TOKENS = 64
MAX_PROMPT_LOOKUP = 32
_DEFAULTS = {"num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


def resolve_speculative(given: Mapping[str, Any] | None) -> SpeculativeConfig | None:  # Any: checked here
    """
    Raises:
        ConfigError: an unknown method or key, or a number out of bounds.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"speculative_config={given!r} is not a dictionary like {{'method': 'ngram'}}; give one, or leave it out"
        )
    known = ("method", *_DEFAULTS)
    if unknown := [key for key in given if key not in known]:
        raise ConfigError(f"speculative_config has no {unknown[0]!r}; it has {', '.join(known)}; leave it out")
    if given.get("method") != "ngram":
        raise ConfigError(
            f"speculative_config: method={given.get('method')!r} is not 'ngram', the only one there is; give it"
        )
    numbers = {**_DEFAULTS, **{key: value for key, value in given.items() if key != "method"}}
    if "prompt_lookup_min" not in given and isinstance(given.get("prompt_lookup_max"), int):
        numbers["prompt_lookup_min"] = min(numbers["prompt_lookup_min"], given["prompt_lookup_max"])
    if "prompt_lookup_max" not in given and isinstance(given.get("prompt_lookup_min"), int):
        numbers["prompt_lookup_max"] = max(numbers["prompt_lookup_max"], given["prompt_lookup_min"])
    for key, value in numbers.items():
        most = MAX_SPECULATIVE_TOKENS if key == "num_speculative_tokens" else MAX_PROMPT_LOOKUP
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ConfigError(
                f"speculative_config: {key}={value!r} is not an integer in [1, {most}]; give one, or leave it out"
            )
    if numbers["prompt_lookup_min"] > numbers["prompt_lookup_max"]:
        raise ConfigError(
            f"speculative_config: prompt_lookup_min={numbers['prompt_lookup_min']} is more than "
            f"prompt_lookup_max={numbers['prompt_lookup_max']}; lower the first or raise the second"
        )
    return SpeculativeConfig(method="ngram", **numbers)
