"""Attention in both directions: prompts are whole, and no cached prefix is used."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.config.architecture import ModelArchitecture
from inflight.config.families.family import in_both_directions
from inflight.config.whole_prompts import is_causal
from inflight.errors import ConfigError
from tests.unit.config.test_resolve import ARCHITECTURE, resolved


@pytest.fixture
def encoder() -> ModelArchitecture:
    found = in_both_directions(ARCHITECTURE)
    assert is_causal(ARCHITECTURE) and not is_causal(found)
    return replace(found, has_head=True)


def test_the_budget_has_room_for_the_longest_prompt(encoder: ModelArchitecture) -> None:
    config = resolved(encoder)
    assert config.scheduler.max_num_batched_tokens == config.model.max_model_len == 4096
    assert not config.scheduler.enable_chunked_prefill
    assert not config.cache.enable_prefix_caching
    assert resolved(encoder, max_model_len=100).scheduler.max_num_batched_tokens == 2048
    assert resolved().cache.enable_prefix_caching


def test_a_budget_of_the_user_that_is_too_small_is_refused(encoder: ModelArchitecture) -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=1000 .*max_model_len=4096"):
        resolved(encoder, max_num_batched_tokens=1000)
    assert resolved(encoder, max_num_batched_tokens=1000, max_model_len=1000).scheduler.max_num_batched_tokens == 1000


def test_a_model_without_a_head_generates_nothing(encoder: ModelArchitecture) -> None:
    with pytest.raises(ConfigError, match="has no head for tokens"):
        resolved(replace(encoder, has_head=False))
