"""quantization_config: which layouts are read, and refusals that say what was given and what is read."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.config.json_fields import JsonFields
from inflight.config.weight_format import parse_weight_blocks, parse_weight_format
from inflight.errors import UnsupportedModelError


def parse(quantization: object) -> str:
    return parse_weight_format(JsonFields({"quantization_config": quantization}))


def compressed(
    weights: dict[str, Any] | None = None, group: dict[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    scheme = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 128,
        **(weights or {}),
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, **(group or {})}},
        **fields,
    }


PER_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FLOAT = {"type": "float", "num_bits": 8, "strategy": "channel"}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
MIXED = compressed(format="mixed-precision")
MIXED["config_groups"]["group_1"] = {"format": "float-quantized", "weights": {**FLOAT, "strategy": "block"}}


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        (None, "plain"),
        (GPTQ, "gptq"),
        ({**GPTQ, "bits": 8, "desc_act": True, "checkpoint_format": "gptq"}, "gptq"),
        ({**GPTQ, "checkpoint_format": "gptq_v2"}, "gptq_v2"),
        (AWQ, "awq"),
        ({**GPTQ, "group_size": -1}, "gptq"),
        ({**AWQ, "group_size": None}, "awq"),
        ({**AWQ, "version": "GEMM"}, "awq"),
        (compressed(), "compressed-tensors"),
        (compressed({"num_bits": 8, "strategy": "channel"}, {"input_activations": PER_TOKEN}), "compressed-tensors"),
        (compressed(format="int-quantized", sparsity_config={"format": "dense"}), "compressed-tensors"),
        (compressed(format="mixed-precision"), "compressed-tensors"),
        (compressed(quantization_status="frozen"), "compressed-tensors"),
        (FP8, "fp8"),
        ({"quant_method": "fp8", "activation_scheme": "anything", "ignored_layers": ["lm_head"]}, "fp8"),
        ({**FP8, "fmt": "e4m3", "scale_fmt": "ue8m0", "modules_to_not_convert": None}, "fp8"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "fbgemm_fp8"),
        (compressed(FLOAT, format="float-quantized"), "compressed-tensors in fp8"),
        (compressed({**FLOAT, "strategy": "tensor"}, format="float-quantized"), "compressed-tensors in fp8"),
        (compressed(FLOAT, {"input_activations": STATIC}, format="float-quantized"), "compressed-tensors in fp8"),
        (compressed(FLOAT, format="float-quantized", kv_cache_scheme={"num_bits": 8}), "compressed-tensors in fp8"),
        (compressed(FLOAT, {"format": "float-quantized"}, format="mixed-precision"), "compressed-tensors in fp8"),
        (MIXED, "compressed-tensors"),
    ],
)
def test_what_is_read(quantization: object, name: str) -> None:
    assert parse(quantization) == name


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ("gptq", ["quantization_config='gptq' is not an object"]),
        ({}, ["quant_method is missing"]),
        (
            {"quant_method": "hqq"},
            ["quant_method='hqq'", "gptq", "awq", "compressed-tensors", "fp8 (e4m3)", "GGUF", "plain checkpoint"],
        ),
        ({**FP8, "fmt": "e5m2"}, ["fmt='e5m2'"]),
        ({**FP8, "scale_fmt": "e5m3"}, ["scale_fmt='e5m3'"]),
        (compressed({**FLOAT, "num_bits": 4}, format="float-quantized"), ["num_bits=4"]),
        (compressed({**FLOAT, "strategy": "tensor_group"}, format="float-quantized"), ["strategy='tensor_group'"]),
        (compressed({**FLOAT, "strategy": "group"}, format="float-quantized"), ["strategy='group'"]),
        (compressed(format="float-quantized"), ["group_0: weights: type='int'"]),
        ({**MIXED, "kv_cache_scheme": {"num_bits": 8}}, ["kv_cache_scheme"]),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ["bitsandbytes"]),
        ({**GPTQ, "bits": 3}, ["bits=3", "4 and 8 bits"]),
        ({**GPTQ, "bits": True}, ["bits=True"]),
        ({"quant_method": "gptq"}, ["bits=None"]),
        ({**GPTQ, "checkpoint_format": "marlin"}, ["checkpoint_format='marlin'"]),
        ({**GPTQ, "is_marlin_format": True}, ["is_marlin_format=True"]),
        ({**AWQ, "bits": 8}, ["bits=8"]),
        ({**AWQ, "group_size": 0}, ["group_size=0"]),
        ({**GPTQ, "group_size": "128"}, ["group_size='128'"]),
        (compressed({"group_size": 2.5}), ["group_0: weights: group_size=2.5"]),
        ({**AWQ, "version": "gemv"}, ["version='gemv'", "gemm"]),
        (compressed(format=None), ["format=None"]),
        (compressed({"type": "float"}), ["group_0: weights: type='float'"]),
        (compressed({"num_bits": 2}), ["num_bits=2"]),
        (compressed({"strategy": "block"}), ["strategy='block'"]),
        (compressed({"dynamic": True}), ["dynamic=True"]),
        (compressed(group={"weights": None}), ["weights: type=None"]),
        (
            compressed(group={"input_activations": {**PER_TOKEN, "dynamic": False}}),
            ["input_activations: dynamic=False"],
        ),
        (compressed(group={"input_activations": {**PER_TOKEN, "strategy": "tensor"}}), ["strategy='tensor'"]),
        (compressed(group={"output_activations": PER_TOKEN}), ["output_activations"]),
        (compressed(group={"format": "nvfp4-pack-quantized"}), ["nvfp4"]),
        (compressed(config_groups={}), ["config_groups is missing"]),
        (compressed(config_groups={"group_0": 3}), ["group_0=3 is not an object"]),
        (compressed(quantization_status="calibration"), ["quantization_status='calibration'"]),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), ["sparse-24-bitmask"]),
        (compressed(kv_cache_scheme={"num_bits": 8}), ["kv_cache_scheme"]),
        (compressed(transform_config={"config_groups": {"u": {}}}), ["transform_config"]),
    ],
)
def test_what_is_refused(quantization: object, words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        parse(quantization)
    for word in ("quantization_config", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ({**GPTQ, "format": "gptq_v2"}, "gptq_v2"),
        ({**GPTQ, "format": "gptq_v2", "checkpoint_format": "gptq"}, "gptq"),
        ({**GPTQ, "is_marlin_format": False}, "gptq"),
        ({**GPTQ, "quant_method": "GPTQ"}, "gptq"),
        ({**AWQ, "format": "gemm"}, "awq"),
        ({**AWQ, "format": "gemv", "version": "gemm"}, "awq"),
        (compressed(format="naive-quantized"), "compressed-tensors"),
        (compressed({"strategy": "tensor"}, {"format": "int-quantized"}), "compressed-tensors"),
        (compressed(kv_cache_scheme=None, transform_config={}), "compressed-tensors"),
        (compressed({"dynamic": False}, {"input_activations": None, "output_activations": None}), "compressed-tensors"),
    ],
)
def test_other_spellings_that_are_read(quantization: object, name: str) -> None:
    assert parse(quantization) == name


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({**GPTQ, "format": "marlin"}, "format='marlin' is not supported"),
        ({**AWQ, "format": "gemv"}, "format='gemv' is not supported"),
        (compressed(group={"format": "mixed-precision"}), "group_0: format='mixed-precision'"),
        (compressed(group={"input_activations": {**PER_TOKEN, "num_bits": 4}}), "input_activations: num_bits=4"),
        (compressed(group={"input_activations": {**PER_TOKEN, "type": "float"}}), "input_activations: type='float'"),
        (compressed({"strategy": "token"}), "weights: strategy='token'"),
        (compressed(config_groups=None), "config_groups is missing"),
        (
            compressed(config_groups={**compressed()["config_groups"], "group_1": {"weights": {"num_bits": 3}}}),
            "group_1: weights: type=None",
        ),
    ],
)
def test_other_variants_that_are_refused(quantization: object, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        parse(quantization)


def blocks(quantization: object) -> tuple[int, int] | None:
    return parse_weight_blocks(JsonFields({"quantization_config": quantization}))


def test_blocks_of_weights() -> None:
    assert blocks(None) is None
    assert blocks(GPTQ) is None
    assert blocks({**FP8, "weight_block_size": None}) is None
    assert blocks(FP8) == (128, 128)
    in_blocks = {**FLOAT, "strategy": "block", "block_structure": [64, 128]}
    assert blocks(compressed(in_blocks, format="float-quantized")) == (64, 128)
    several = compressed(in_blocks, format="float-quantized")
    other = {**in_blocks, "block_structure": [128, 128]}
    several["config_groups"]["group_1"] = {"weights": other}
    with pytest.raises(UnsupportedModelError, match=r"block_structure .*\[\(64, 128\), \(128, 128\)\]"):
        blocks(several)


@pytest.mark.parametrize("size", [128, [128], [128, 0], [128, 128.0], [128, True], "128x128", [1, 2, 3]])
def test_blocks_that_are_none(size: object) -> None:
    with pytest.raises(UnsupportedModelError, match=r"quantization_config: weight_block_size="):
        blocks({**FP8, "weight_block_size": size})
