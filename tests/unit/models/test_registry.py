"""The registry and the list of names in the torch-free parser are the same."""

from __future__ import annotations

import pytest

from inflight.config.parse_architecture import SUPPORTED_ARCHITECTURES
from inflight.errors import UnsupportedModelError
from inflight.models.causal_lm import CausalLM
from inflight.models.registry import get_model_class


@pytest.mark.parametrize("name", SUPPORTED_ARCHITECTURES)
def test_every_supported_name_has_its_class(name: str) -> None:
    assert issubclass(get_model_class(name), CausalLM)


def test_another_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        get_model_class("GPT2LMHeadModel")
    assert all(name in str(caught.value) for name in ("GPT2LMHeadModel", *SUPPORTED_ARCHITECTURES))
