"""Checks the dictionary `speculative_config`, and completes it with defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inflight.config.engine import SpeculativeConfig
from inflight.errors import ConfigError
from inflight.setting import check_values, settings_of


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
    known = settings_of(SpeculativeConfig)
    if unknown := [key for key in given if key not in known]:
        raise ConfigError(f"speculative_config has no {unknown[0]!r}; it has {', '.join(known)}; leave it out")
    for problem in check_values(SpeculativeConfig, {"method": None, **given}).values():
        raise ConfigError(f"speculative_config: {problem}; give one, or leave speculative_config out")
    config = SpeculativeConfig(**given)
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    if low > high and "prompt_lookup_min" not in given:
        return replace(config, prompt_lookup_min=high)
    if low > high and "prompt_lookup_max" not in given:
        return replace(config, prompt_lookup_max=low)
    if low > high:
        raise ConfigError(
            f"speculative_config: prompt_lookup_min={low} is more than prompt_lookup_max={high}; lower the first or raise the "
            "second"
        )
    return config
