"""quantize_config.json and quant_config.json beside config.json: read like quantization_config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inflight.config.gguf_config import read_model_config
from inflight.config.json_fields import JsonFields
from inflight.config.weight_format import parse_weight_format
from inflight.errors import ConfigError, UnsupportedModelError

# As AutoGPTQ and AutoAWQ have written them
AUTO_GPTQ = {
    "bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "static_groups": False, "sym": True,
    "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model",
}  # fmt: skip
GPTQ_MODEL = {**AUTO_GPTQ, "quant_method": "gptq", "checkpoint_format": "gptq_v2"}
AUTO_AWQ = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
MODEL_OPT = {
    "producer": {"name": "modelopt", "version": "0.33.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}
OF_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}


def folder_of(folder: Path, config: dict[str, Any] | None = None, **files: object) -> Path:
    own = {} if config is None else {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, **own}))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def weight_format(folder: Path) -> str:
    return parse_weight_format(JsonFields(read_model_config(folder)))


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        (None, {"quantize_config": AUTO_GPTQ}, "gptq"),
        (None, {"quantize_config": GPTQ_MODEL}, "gptq_v2"),
        (None, {"quant_config": AUTO_AWQ}, "awq"),
        (None, {"quantize_config": AUTO_AWQ}, "awq"),
        (None, {"quant_config": AUTO_GPTQ}, "gptq"),
        (OF_CONFIG, {"quantize_config": AUTO_GPTQ}, "gptq"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, {"quant_config": AUTO_AWQ}, "awq"),
        (None, {"hf_quant_config": MODEL_OPT}, "fp8"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
            {"hf_quant_config": MODEL_OPT},
            "fp8",
        ),
        (None, {"generation_config": {}}, "plain"),
    ],
)
def test_the_format(tmp_path: Path, config: dict[str, Any] | None, files: dict[str, object], expected: str) -> None:
    assert weight_format(folder_of(tmp_path, config, **files)) == expected


@pytest.mark.parametrize(
    ("config", "files", "words"),
    [
        (OF_CONFIG, {"quantize_config": {**AUTO_GPTQ, "bits": 8}}, ["quantize_config.json has bits=8", "has bits=4"]),
        (OF_CONFIG, {"quantize_config": {**AUTO_GPTQ, "group_size": 32}}, ["group_size=32", "group_size=128"]),
        (OF_CONFIG, {"quant_config": AUTO_AWQ}, ["quant_config.json has quant_method='awq'", "quant_method='gptq'"]),
        (None, {"quantize_config": AUTO_GPTQ, "quant_config": AUTO_AWQ}, ["'awq'", "'gptq'"]),
        (
            None,
            {"hf_quant_config": {"quantization": {"quant_algo": "NVFP4"}}},
            ["quant_algo='NVFP4'", "modelopt (FP8)"],
        ),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, {}, ["quant_algo='MIXED_PRECISION'"]),
        ({"quant_method": "modelopt"}, {}, ["quant_algo=None"]),
        (
            None,
            {"hf_quant_config": {"producer": {"name": "modelopt"}}},
            ["hf_quant_config.json has no object quantization"],
        ),
        (None, {"quantize_config": {"bits": 4}}, ["quantize_config.json does not say by which method", "quant_method"]),
        (None, {"quantize_config": {**AUTO_GPTQ, "bits": 3}}, ["bits=3", "4 and 8 bits"]),
        (None, {"quant_config": {**AUTO_AWQ, "version": "GEMV"}}, ["version='GEMV'", "gemm"]),
    ],
)
def test_what_is_refused(
    tmp_path: Path, config: dict[str, Any] | None, files: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        weight_format(folder_of(tmp_path, config, **files))
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantize_config\.json is not valid JSON"):
        read_model_config(folder_of(tmp_path, quantize_config="{"))


@pytest.mark.parametrize(
    ("field", "one", "other"), [("zero_point", True, False), ("version", "GEMM", "gemv"), ("bits", 4, "8")]
)
def test_contradictions_of_awq(tmp_path: Path, field: str, one: object, other: object) -> None:
    own = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm", field: other}
    with pytest.raises(UnsupportedModelError, match=f"has {field}={one!r}, but .* has {field}={other!r}; remove"):
        weight_format(folder_of(tmp_path, own, quant_config=AUTO_AWQ))


def test_what_only_one_file_says_is_no_contradiction(tmp_path: Path) -> None:
    own = {**OF_CONFIG, "checkpoint_format": "gptq_v2"}
    assert weight_format(folder_of(tmp_path, own, quantize_config=AUTO_GPTQ)) == "gptq_v2"
    other = {"quantize_config": {**GPTQ_MODEL, "checkpoint_format": "gptq"}}
    with pytest.raises(UnsupportedModelError, match="checkpoint_format='gptq', but"):
        weight_format(folder_of(tmp_path, own, **other))


def test_a_file_of_modelopt_beside_a_config_that_says_it_all(tmp_path: Path) -> None:
    assert weight_format(folder_of(tmp_path, OF_CONFIG, hf_quant_config={})) == "gptq"
