"""A config.json that names no dtype, or "auto": the dtype is that of the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inflight.config.gguf_config import read_model_config
from inflight.config.unknown_family import describe_model
from tests.support.model_zoo import FAMILY_CONFIGS

CONFIG = {
    name: value for name, value in FAMILY_CONFIGS["llama"][0].to_dict().items() if name not in ("dtype", "torch_dtype")
} | {"architectures": ["LlamaForCausalLM"]}
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def dtype_of(folder: Path, fields: dict[str, Any], *files: dict[str, torch.Tensor], of: dict[str, Any] = CONFIG) -> str:
    (folder / "config.json").write_text(json.dumps({**of, **fields}))
    for i, tensors in enumerate(files):
        save_file(tensors, folder / f"model-{i}.safetensors")
    return describe_model(read_model_config(folder), "auto").dtype


@pytest.mark.parametrize("fields", [{}, {"dtype": None}, {"dtype": "auto"}, {"torch_dtype": "auto"}])
@pytest.mark.parametrize(
    ("dtype", "expected"), [(BF16, "bfloat16"), (F16, "float16"), (F32, "float32"), (F64, "float32")]
)
def test_the_weights_say_it(tmp_path: Path, fields: dict[str, Any], dtype: torch.dtype, expected: str) -> None:
    assert dtype_of(tmp_path, fields, {"a": torch.ones(4, dtype=dtype)}) == expected


def test_most_of_the_weights_count(tmp_path: Path) -> None:
    """Norms are often in float32. The integers of a quantized checkpoint do not count."""
    norms = {"norm": torch.ones(8), "qweight": torch.ones(999, dtype=torch.int32)}
    weights = {"weight": torch.ones(3, 4, dtype=BF16), "scales": torch.ones(1, dtype=F16)}
    assert dtype_of(tmp_path, {}, norms, weights) == "bfloat16"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": "auto", "torch_dtype": "float16"}, "float16"),
        ({"dtype": "FP16"}, "float16"),
        ({"dtype": "Half"}, "float16"),
        ({"dtype": "fp32"}, "float32"),
    ],
)
def test_a_name_in_config_json_counts(tmp_path: Path, fields: dict[str, Any], expected: str) -> None:
    assert dtype_of(tmp_path, fields, {"a": torch.ones(4, dtype=BF16)}) == expected


@pytest.mark.parametrize(
    ("outside", "inside", "expected"),
    [
        ("auto", "float16", "float16"),
        (None, "float16", "float16"),
        (None, "auto", "bfloat16"),
        ("auto", None, "bfloat16"),
    ],
)
def test_a_model_that_also_reads_images(tmp_path: Path, outside: str | None, inside: str | None, expected: str) -> None:
    wrapper = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    text = {**CONFIG, "model_type": "mistral", "dtype": inside}
    fields = {"dtype": outside, "text_config": text}
    assert dtype_of(tmp_path, fields, {"a": torch.ones(4, dtype=BF16)}, of=wrapper) == expected


def test_without_weights_it_is_float32(tmp_path: Path) -> None:
    assert dtype_of(tmp_path, {"dtype": "auto"}) == "float32"
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert dtype_of(tmp_path, {}) == "float32"
