"""`ReasoningConfig`: vLLM's --reasoning-config."""

from __future__ import annotations

import pytest

from inflight.config.reasoning import ReasoningConfig, resolve_reasoning
from inflight.errors import ConfigError


def test_values_and_defaults() -> None:
    assert resolve_reasoning(None) == resolve_reasoning({}) == ReasoningConfig()
    given = {"reasoning_start_str": None, "reasoning_end_str": "Now.</think>", "reasoning_parser": "qwen3"}
    assert resolve_reasoning(given) == ReasoningConfig(reasoning_parser="qwen3", reasoning_end_str="Now.</think>")


@pytest.mark.parametrize("given", [{"reasoning_end": "x"}, {"reasoning_end_str": 5}, "</think>", ["x"]])
def test_what_is_refused(given: object) -> None:
    with pytest.raises(ConfigError):
        resolve_reasoning(given)  # type: ignore[arg-type]
