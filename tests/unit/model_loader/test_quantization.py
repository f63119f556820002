"""Weights that are brought to fewer bits as they are read: how far off the result is, what stays, and what is refused."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inflight import LLM
from inflight.config.engine import QuantizationConfig
from inflight.errors import CheckpointError, ConfigError
from tests.support.full_context_attention import load, run_prompt
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE
from tests.support.model_zoo import FAMILY_CONFIGS, write_model

PROMPT = torch.arange(40)
EMBEDDING = "model.embed_tokens.weight"
needs_kernels = pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="no C++ kernels here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(FAMILY_CONFIGS["llama"][0], tmp_path_factory.mktemp("model") / "whole", seed=1)


def error(logits: Tensor, truth: Tensor) -> float:
    return float((logits - truth).norm() / truth.norm())


@needs_kernels
def test_fewer_bits_are_further_off(folder: Path) -> None:
    truth = run_prompt(load(folder, QuantizationConfig()), PROMPT)
    eight = error(run_prompt(load(folder, QuantizationConfig(layers="int8")), PROMPT), truth)
    four = {
        size: error(run_prompt(load(folder, QuantizationConfig(layers="int4", group_size=size)), PROMPT), truth)
        for size in (32, 64)
    }
    assert 0.001 < eight < 0.06
    assert eight < four[32] < 0.5


@needs_kernels
def test_the_head_is_chosen_apart(folder: Path) -> None:
    truth = run_prompt(load(folder, QuantizationConfig()), PROMPT)
    head = error(run_prompt(load(folder, QuantizationConfig(head="int8")), PROMPT), truth)
    assert 0.001 < head < 0.02  # one product of rounded numbers
    both = run_prompt(load(folder, QuantizationConfig(layers="int8", head="int8")), PROMPT)
    layers = run_prompt(load(folder, QuantizationConfig(layers="int8")), PROMPT)
    assert not torch.equal(both, layers)


@needs_kernels
def test_a_weight_without_groups_of_32_has_8_bits(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(folder, QuantizationConfig(layers="int4", group_size=128))
    assert "4 bits need a multiple of 32" in caplog.text  # down_proj has 112 input features


def test_quantization_without_kernels_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "off")
    for config in (QuantizationConfig(layers="int8"), QuantizationConfig(head="int4")):
        with pytest.raises(ConfigError, match=r"needs the C\+\+ kernels.*leave it out"):
            load(folder, config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quantization": "int3"}, "quantization='int3' is not one of 'int8', 'int4', 'fp8', 'awq'"),
        ({"quantization": "gptq"}, "quantization='gptq', but the weights of this checkpoint are not quantized"),
        ({"head_quantization": "fp8"}, "head_quantization='fp8' is not for device='cpu'; give 'int8' or 'int4'"),
        (
            {"quantization": "int4", "quantization_group_size": 48},
            "quantization_group_size=48 is not one of 32, 64, 128",
        ),
        ({"batch_invariant": "yes"}, "batch_invariant='yes' is not True or False"),
    ],
)
def test_what_is_no_format(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**arguments)


def test_batch_invariance_is_promised_or_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^batch_invariant=True .*attention"):
        load(folder, QuantizationConfig(), batch_invariant=True)
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "off")
    with pytest.raises(ConfigError, match=r"cannot be kept here: its linear layers"):
        load(folder, QuantizationConfig(), batch_invariant=True)


@needs_kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.q_proj.weight", EMBEDDING]
)
def test_a_weight_that_is_not_finite_is_not_quantized(folder: Path, tmp_path: Path, name: str, value: float) -> None:
    """It would become some number, and the answers would only be wrong."""
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    tensors = load_file(damaged / "model.safetensors")
    tensors[name][1, 2] = value
    save_file(tensors, damaged / "model.safetensors")
    for config in (
        QuantizationConfig(layers="int8"),
        QuantizationConfig(layers="int4"),
        QuantizationConfig(head="int8"),
    ):
        with pytest.raises(CheckpointError, match=f"{name} .*NaN"):
            load(damaged, config)
    load(damaged, QuantizationConfig())  # in floats, each answer that meets it ends with an error


@needs_kernels
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_batch_invariance_of_recurrent_layers(family: str, tmp_path: Path) -> None:
    """The gated delta rule computes in chunks, whose sums depend on where the scheduler has cut. A short convolution does not:
    there the only reason is the attention, a stand-in here."""
    model = write_model(FAMILY_CONFIGS[family][0], tmp_path / "model", seed=1)
    reason = "its attention" if family == "lfm2" else "the results of its recurrent layers"
    with pytest.raises(ConfigError, match=f"^batch_invariant=True .*{reason}"):
        load(model, QuantizationConfig(), batch_invariant=True)
