"""generation_config.json: sampling defaults and end tokens."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.engine.start.generation_defaults import default_sampling_params, eos_token_ids, warn_of_unknown_fields
from inflight.errors import ConfigError
from inflight.sampling_params import SamplingParams


def test_nothing_given() -> None:
    assert default_sampling_params(None) == SamplingParams()
    assert default_sampling_params({"bos_token_id": 1, "transformers_version": "5"}) == SamplingParams()


def test_the_fields_it_names() -> None:
    config = {
        "do_sample": False, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None,
        "repetition_penalty": 1.05, "max_new_tokens": 77, "eos_token_id": [1, 2],
    }  # fmt: skip
    assert default_sampling_params(config) == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05, max_tokens=77
    )


def test_a_value_out_of_bounds() -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json: top_p=1\.5 .*generation_config='none'"):
        default_sampling_params({"top_p": 1.5})


@pytest.mark.parametrize(("value", "ids"), [(None, set()), (3, {3}), ([3, 5], {3, 5})])
def test_eos(value: Any, ids: set[int]) -> None:
    assert eos_token_ids({"eos_token_id": value}) == ids
    assert eos_token_ids(None) == frozenset()


@pytest.mark.parametrize("value", ["</s>", [None], -2, [True], 1.0])
def test_bad_eos(value: Any) -> None:
    with pytest.raises(ConfigError, match="eos_token_id"):
        eos_token_ids({"eos_token_id": value})


def test_names_without_effect_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_unknown_fields({"temperature": 0.5, "temprature": 0.5, "eos_token_id": 3, "do_sample": True})
    assert caplog.messages == ["override_generation_config: these fields have no effect: 'temprature', 'do_sample'"]
    warn_of_unknown_fields({"top_p": 0.5})
    assert len(caplog.messages) == 1
