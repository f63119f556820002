"""Attention in both directions: prompts are whole, and no cached prefix is used."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.config.architecture import ModelArchitecture
from inflight.config.families.family import in_both_directions
from inflight.config.families.vision_family import without_vision
from inflight.config.parse_architecture import parse_architecture
from inflight.config.whole_prompts import is_causal, keeps_images_whole
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


@pytest.fixture
def with_images() -> ModelArchitecture:
    """Images of 256 tokens, which see each other in both directions."""
    tower = {"hidden_size": 1152, "num_attention_heads": 16, "image_size": 896, "patch_size": 14}
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096}
    text = {"model_type": "gemma3_text", **sizes, **heads}
    found = parse_architecture(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "image_token_index": 299,
            "text_config": text,
            "vision_config": tower,
        }
    )
    assert keeps_images_whole(found) and not keeps_images_whole(ARCHITECTURE)
    return found


def test_a_step_has_room_for_an_image(with_images: ModelArchitecture) -> None:
    config = resolved(with_images)
    assert config.scheduler.max_num_batched_tokens == 2048
    assert config.scheduler.enable_chunked_prefill and config.cache.enable_prefix_caching
    drafts = {"method": "ngram", "num_speculative_tokens": 9}
    config = resolved(with_images, speculative_config=drafts)
    assert config.scheduler.max_num_batched_tokens == 256 + 255 * 10
    assert resolved(with_images, max_num_seqs=5, max_num_batched_tokens=260).scheduler.max_num_batched_tokens == 260
    assert resolved(with_images, max_num_seqs=5, max_num_batched_tokens=104, max_model_len=100)


@pytest.mark.parametrize("given", [{"max_num_seqs": 5, "max_num_batched_tokens": 259}, {"max_num_batched_tokens": 510}])
def test_a_step_without_room_for_an_image_is_refused(with_images: ModelArchitecture, given: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"an image of 256 tokens.*max_num_seqs"):
        resolved(with_images, **given)
    assert resolved(without_vision(with_images), **given)
    assert resolved(with_images, **{**given, "max_model_len": 200}, enable_chunked_prefill=False)
