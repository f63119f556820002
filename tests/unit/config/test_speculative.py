"""`speculative_config`: what is completed, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from inflight.config.speculative import SpeculativeConfig, resolve_speculative
from inflight.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, (4, 2, 4)),
        ({"num_speculative_tokens": 64}, (64, 2, 4)),
        ({"prompt_lookup_max": 1}, (4, 1, 1)),
        ({"prompt_lookup_min": 7}, (4, 7, 7)),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 3}, (4, 1, 3)),
    ],
)
def test_what_is_left_out_is_completed(given: dict[str, Any], wanted: tuple[int, int, int]) -> None:
    count, low, high = wanted
    assert resolve_speculative({"method": "ngram", **given}) == SpeculativeConfig(
        method="ngram", num_speculative_tokens=count, prompt_lookup_min=low, prompt_lookup_max=high
    )


@pytest.mark.parametrize(
    "method", ["mtp", "deepseek_mtp", "qwen3_next_mtp", "qwen3_5_mtp", "glm4_moe_mtp", "ernie_mtp"]
)
def test_every_family_has_one_name_of_mtp(method: str) -> None:
    assert resolve_speculative({"method": method}) == SpeculativeConfig(method="mtp")


def test_suffix_has_the_defaults_of_vllm() -> None:
    config = resolve_speculative({"method": "suffix"})
    assert config is not None
    assert (
        config.suffix_decoding_max_tree_depth,
        config.suffix_decoding_max_cached_requests,
        config.suffix_decoding_max_spec_factor,
        config.suffix_decoding_min_token_prob,
    ) == (24, 10_000, 1.0, 0.1)


def test_none_is_no_speculation() -> None:
    assert resolve_speculative(None) is None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("ngram", "not a dictionary"),
        ({}, "method=None"),
        ({"method": "medusa"}, "method='medusa'"),
        ({"method": "eagle"}, "eagle needs a `model`.*the EAGLE head"),
        ({"method": "mtp", "model": "a"}, "model is for method='draft_model' or 'eagle' or 'eagle3'"),
        ({"method": "ngram", "num_tokens": 3}, "has no 'num_tokens'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, r"num_speculative_tokens=0 .* \[1, 64\]"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens=True"),
        ({"method": "ngram", "prompt_lookup_max": "3"}, "prompt_lookup_max='3'"),
        ({"method": "ngram", "prompt_lookup_max": 33}, r"\[1, 32\]"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "lower the first"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "prompt_lookup_max is for method='ngram'"),
        ({"method": "ngram", "suffix_decoding_min_token_prob": 0.2}, "min_token_prob is for method='suffix'"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 0}, r"not a number in \(0, 64\]"),
    ],
)
def test_what_does_not_fit_is_named(given: Any, text: str) -> None:  # Any: wrong on purpose
    with pytest.raises(ConfigError, match=text) as caught:
        resolve_speculative(given)
    assert re.search("; (give|leave|lower|correct) ", str(caught.value))


def test_fields_of_vllm_are_told_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    given = {"model": "a/model", "max_model_len": 512, "disable_by_batch_size": 8, "num_speculative_tokens": 3}
    config = resolve_speculative(given)
    assert config == SpeculativeConfig(method="draft_model", model="a/model", num_speculative_tokens=3)
    assert "max_model_len, disable_by_batch_size has no meaning here" in caplog.text
    with pytest.raises(ConfigError, match="has no 'max_model_length'"):
        resolve_speculative({"model": "a/model", "max_model_length": 512})
