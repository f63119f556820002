"""What programs for vLLM give to `LLM` or call on it."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

import pytest

from inflight import LLM, InflightError
from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.cli.foreign_flags import HARMLESS_VALUES, NO_EFFECT, REFUSED
from inflight.entrypoints.foreign_llm import METHODS, own_arguments
from inflight.errors import ConfigError, UnknownArgumentError, UnsupportedMethodError
from tests.unit.entrypoints.cli.test_foreign_flags import names
from tests.unit.entrypoints.mock_llm import mock_arguments

OURS = {each.name for each in fields(EngineArgs)}


def as_argument(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_").replace("*", "x")


@pytest.mark.parametrize("flag", [flag for flag in names(REFUSED) if flag.startswith("--")])
def test_an_argument_that_is_refused_says_why(flag: str, caplog: pytest.LogCaptureFixture) -> None:
    name = as_argument(flag)
    with pytest.raises(UnknownArgumentError, match=rf"^{name}=.* is not supported: \S"):
        own_arguments({name: "some value"})
    for neutral in (None, False, *HARMLESS_VALUES.get(flag, ())):
        assert own_arguments({name: neutral, "model": "m"}) == {"model": "m"}
    assert not caplog.records


@pytest.mark.parametrize("flag", [flag for flag in names(NO_EFFECT) if flag.startswith("--")] + ["--disable-log-stats"])
def test_an_argument_without_effect_is_left_out_with_a_note(flag: str, caplog: pytest.LogCaptureFixture) -> None:
    name = as_argument(flag)
    with caplog.at_level(logging.WARNING):
        assert own_arguments({name: 4, "seed": 1}) == {"seed": 1}
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [f"{name} has no effect here"]


@pytest.mark.parametrize("name", sorted(OURS))
def test_our_own_arguments_stay(name: str) -> None:
    value = object()
    assert own_arguments({name: value}) == {name: value}


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"generation_config": "vllm"}, {"generation_config": "none"}),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8"}),
        ({"max_cudagraph_capture_size": 8}, {"cuda_graph_max_tokens": 8}),
        ({"device_memory_utilization": 0.5}, {"gpu_memory_utilization": 0.5}),
        ({"runner": "generate", "convert": "none"}, {"runner": "generate", "convert": "none"}),
    ],
)
def test_what_has_the_same_meaning_is_translated(given: dict[str, Any], ours: dict[str, Any]) -> None:
    assert own_arguments(given) == ours


def test_a_reason_names_arguments_and_no_options() -> None:
    with pytest.raises(UnknownArgumentError, match=r"kv_cache_memory_bytes$"):
        own_arguments({"num_gpu_blocks_override": 5})


def test_an_unknown_argument_proposes_the_nearest() -> None:
    for kind in (ConfigError, TypeError):
        with pytest.raises(kind, match="did you mean 'max_model_len'"):
            LLM(max_modle_len=5)


def test_methods_of_vllm_say_what_to_do() -> None:
    with LLM(**mock_arguments()) as llm:
        for name in METHODS:
            assert not hasattr(llm, name)
            with pytest.raises(UnsupportedMethodError, match=name) as found:
                getattr(llm, name)
            assert isinstance(found.value, InflightError) and isinstance(found.value, AttributeError)
        with pytest.raises(AttributeError) as other:
            llm.genrate  # noqa: B018  # reads the attribute
        assert not isinstance(other.value, InflightError)
        assert (other.value.name, other.value.obj) == ("genrate", llm)
