"""Checkpoints in fp8: models equal those of the same weights in plain form, and damaged files are refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inflight.config.engine import QuantizationConfig
from inflight.config.gguf_config import read_model_config
from inflight.config.parse_architecture import parse_architecture
from inflight.config.ranks import RankLayout
from inflight.config.weight_format import COMPRESSED_TENSORS
from inflight.config.weight_room import find_room
from inflight.distributed.thread_world import ThreadWorlds
from inflight.errors import CheckpointError
from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.layers.stored_parts import StoredParts
from inflight.model_loader.checkpoint import Checkpoint
from inflight.model_loader.float8_source import Float8Source
from inflight.model_loader.packed_checkpoint import PackedCheckpoint
from tests.support.float8_checkpoints import DrawnFloat8, draw_float8, write_float8
from tests.support.full_context_attention import load, run_prompt
from tests.support.model_zoo import FALLBACK_CONFIGS, FAMILY_CONFIGS, write_model
from tests.support.quantized_checkpoints import draw, int_quantized

PROMPT = torch.arange(9)
WEIGHT = "model.layers.0.mlp.up_proj.weight"
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [48, 32]}
WHOLE = {"quant_method": "fp8", "activation_scheme": "static"}
MODEL_OPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "kv_cache_scheme": {"num_bits": 8}}
ROWS = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head", "o_proj"]}


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False, **weights}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


# name -> (quantization_config, the end of the names of scales, rows and columns of a block)
FORMATS: dict[str, tuple[dict[str, Any], str, tuple[int, int] | None]] = {
    "blocks": (BLOCKS, "_scale_inv", (48, 32)),
    "one scale": (WHOLE, "_scale", None),
    "one scale_inv": (WHOLE, "_scale_inv", None),
    "fbgemm": (ROWS, "_scale", (1, 0)),
    "modelopt": (MODEL_OPT, "_scale", None),
    "modelopt, rows": ({**MODEL_OPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "_scale", (1, 0)),
    "compressed, channels": (compressed("channel"), "_scale", (1, 0)),
    "compressed, blocks": (compressed("block", block_structure=[48, 32]), "_scale", (48, 32)),
}


def write_pair(
    tmp_path: Path, name: str, family: str = "llama", dtype: torch.dtype = torch.float32
) -> tuple[Path, Path]:
    """The same model in plain form, and in fp8. The first layer's o_proj stays plain."""
    quantization, suffix, block = FORMATS[name]
    config = FAMILY_CONFIGS.get(family, FALLBACK_CONFIGS.get(family, []))[0]
    plain = write_model(config, tmp_path / "plain", seed=3)
    keeps = ("layers.0.self_attn.o_proj",)
    write_float8(plain, tmp_path / "fp8", quantization, suffix=suffix, block=block, keeps=keeps, dtype=dtype)
    return plain, tmp_path / "fp8"


@torch.inference_mode()
@pytest.mark.parametrize("name", FORMATS)
def test_a_model_is_that_of_its_weights(tmp_path: Path, name: str) -> None:
    plain, stored = write_pair(tmp_path, name)
    assert torch.equal(run_prompt(load(stored), PROMPT), run_prompt(load(plain), PROMPT))


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_weights_that_are_quantized_again(tmp_path: Path, kind: str) -> None:
    plain, stored = write_pair(tmp_path, "blocks")
    quantization = QuantizationConfig(layers=kind, head="int8", group_size=32)
    assert torch.equal(run_prompt(load(stored, quantization), PROMPT), run_prompt(load(plain, quantization), PROMPT))


@torch.inference_mode()
@pytest.mark.parametrize("name", ["blocks", "one scale", "fbgemm"])
@pytest.mark.parametrize("is_stacked", [False, True])
def test_experts(tmp_path: Path, name: str, is_stacked: bool) -> None:
    plain, stored = write_pair(tmp_path, name, "qwen3_moe")
    if is_stacked:
        stack_experts(plain)
        quantization, suffix, block = FORMATS[name]
        stored = tmp_path / "stacked"
        write_float8(plain, stored, quantization, suffix=suffix, block=block)
        assert any(tensor.dim() == 3 for tensor in load_file(stored / "model.safetensors").values())
    assert torch.equal(run_prompt(load(stored), PROMPT), run_prompt(load(plain), PROMPT))


def stack_experts(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        of_all = {
            projection: torch.stack([weights.pop(f"{prefix}.{expert}.{projection}.weight") for expert in range(8)])
            for projection in ("gate_proj", "up_proj", "down_proj")
        }
        weights[f"{prefix}.gate_up_proj"] = torch.cat((of_all["gate_proj"], of_all["up_proj"]), dim=1)
        weights[f"{prefix}.down_proj"] = of_all["down_proj"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["blocks", "fbgemm", "one scale"])
def test_ranks_whose_parts_begin_inside_of_blocks(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's 56 columns of down_proj, and 56 rows of up_proj, are no multiples of the blocks' 32 and 48."""
    plain, stored = write_pair(tmp_path, name)
    worlds = ThreadWorlds(RankLayout(tensor_parallel_size=2, pipeline_parallel_size=1), 60.0)
    assemble = StoredParts.assemble
    weights: list[Tensor] = []

    def recording(self: StoredParts, weight: Tensor) -> Sequence[Tensor] | QuantizedWeight:
        found = assemble(self, weight)
        assert not isinstance(found, QuantizedWeight)
        weights.append(torch.cat(list(found)))
        return found

    monkeypatch.setattr(StoredParts, "assemble", recording)
    for rank in range(2):
        for folder in (stored, plain):
            load(folder, tp=worlds.of(rank).tensor_parallel_group("model"))
        num_weights = len(weights) // 2
        assert num_weights > 8
        assert all(torch.equal(*pair) for pair in zip(weights[:num_weights], weights[num_weights:], strict=True))
        weights.clear()


def source_of(
    folder: Path,
    tensors: dict[str, Tensor],
    blocks: tuple[int, int] | None = (128, 128),
    *,
    has_other_formats: bool = False,
) -> Float8Source:
    save_file(tensors, folder / "model.safetensors")
    return Float8Source(Checkpoint(folder), blocks, torch.bfloat16, has_other_formats=has_other_formats)


def drawn_module(**more: Any) -> tuple[DrawnFloat8, dict[str, Tensor]]:
    drawn = draw_float8(np.random.default_rng(1), (200, 300), **{"block": (128, 128), **more})
    return drawn, {WEIGHT: drawn.values, f"{WEIGHT}_scale_inv": drawn.scales}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_the_dtype_of_scales(tmp_path: Path, dtype: torch.dtype) -> None:
    drawn, tensors = drawn_module(dtype=dtype)
    source = source_of(tmp_path, tensors)
    assert source.tensors[WEIGHT].dtype == "BF16"
    assert list(source.tensors) == [WEIGHT]
    with source.open() as read:
        assert torch.equal(read(WEIGHT, (slice(0, 200), slice(0, 300))), drawn.weight(torch.bfloat16))
        assert torch.equal(
            read(WEIGHT, (slice(100, 190), slice(150, 299))), drawn.weight(torch.bfloat16)[100:190, 150:299]
        )


def test_integers_and_fp8_in_one_checkpoint(tmp_path: Path) -> None:
    drawn, tensors = drawn_module()
    integers = draw(np.random.default_rng(1), 48, 64, bits=8, group_size=64, symmetric=True)
    module = "model.layers.0.mlp.down_proj"
    tensors = {WEIGHT: tensors[WEIGHT], f"{WEIGHT}_scale": tensors[f"{WEIGHT}_scale_inv"]}
    tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in int_quantized(integers).items()}
    source = PackedCheckpoint(source_of(tmp_path, tensors, has_other_formats=True), COMPRESSED_TENSORS)
    assert source.notice is not None
    with source.open() as read:
        assert torch.equal(read(WEIGHT, (slice(0, 200), slice(0, 300))), drawn.weight(torch.bfloat16))
        found = read(f"{module}.weight", (slice(0, 48), slice(0, 64)))
        assert isinstance(found, QuantizedWeight)
        assert torch.equal(found.dequantize(), integers.weight())


def test_what_is_told_before_weights_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, stored = write_pair(tmp_path, "one scale")
    file = stored / "model.safetensors"
    weights = load_file(file)
    scales = [name for name in weights if name.endswith("weight_scale")]
    unused = {name.replace("weight_scale", "input_scale"): torch.ones(()) for name in scales}
    save_file({**weights, **unused, "model.layers.1.self_attn.k_scale": torch.ones(1)}, file)
    with caplog.at_level(logging.INFO):
        load(stored)
    (line,) = [record.message for record in caplog.records if "fp8" in record.message]
    for words in (
        "13 weights are stored in fp8 (0.00 GiB) and held as float32 (0.00 GiB of memory)",
        "--quantization int8 or int4",
        "14 scales, such as model.layers.0.",
        "are not used",
    ):
        assert words in line
    caplog.clear()
    with caplog.at_level(logging.INFO):
        load(stored, QuantizationConfig(layers="int8"))
    (line,) = [record.message for record in caplog.records if "fp8" in record.message]
    assert "held as int8" in line
    assert "--quantization" not in line


def test_the_memory_is_that_of_the_floats(tmp_path: Path) -> None:
    plain, stored = write_pair(tmp_path, "blocks", dtype=torch.bfloat16)
    for quantization in (None, "int8", "int4"):
        rooms = [
            find_room(folder, parse_architecture(read_model_config(folder)), "auto", quantization)
            for folder in (plain, stored)
        ]
        assert rooms[0] is not None
        assert rooms[0] == rooms[1]


def change(**tensors: Tensor | None) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Replaces, adds, or (None) takes away. The names are the ends of names behind `WEIGHT`."""

    def changed(stored: dict[str, Tensor]) -> dict[str, Tensor]:
        both = {**stored, **{WEIGHT + end: tensor for end, tensor in tensors.items()}}
        return {name: tensor for name, tensor in both.items() if tensor is not None}

    return changed


def bits(shape: tuple[int, ...], byte: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    found = torch.zeros(shape, dtype=torch.uint8)
    found.view(-1)[-1] = byte
    return found.view(dtype)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


@pytest.mark.parametrize(
    ("spoil", "blocks", "words"),
    [
        (change(_scale_inv=None), (128, 128), ["lacks its scales", "weight_scale_inv or ", "weight_scale"]),
        (change(_scale=ones(2, 3)), (128, 128), ["two tensors of scales"]),
        (change(_scale_inv=ones(3, 2)), (128, 128), ["[3, 2]", "[200, 300]", "128 x 128", "[[1, 1], [200, 1], [2, 3]]"]),
        (change(_scale_inv=ones(2, 3)), None, ["[2, 3]", "one for each row: [[1, 1], [200, 1]]"]),
        (change(_scale_inv=ones(300, 1)), (128, 128), ["[300, 1]"]),
        (change(_scale_inv=ones(300)), (128, 128), ["[300]"]),
        (change(_scale_inv=ones(2)), (128, 128), ["[2]"]),
        (change(_scale_inv=torch.ones(2, 3, dtype=torch.uint8)), (128, 128), ["is stored as U8", "F32, BF16, F16, F8_E8M0"]),
        (change(_scale_inv=ones(2, 3).log().div(0)), (128, 128), ["weight_scale_inv in ", "has a scale that is NaN"]),
        (change(_scale_inv=ones(2, 3) * -1e37), (128, 128), ["too large"]),
        (change(_scale_inv=bits((2, 3), 255, torch.float8_e8m0fnu)), (128, 128), ["a scale that is NaN"]),
        (lambda stored: {**stored, WEIGHT: bits((200, 300), 0x7F)}, (128, 128), ["0x7f or 0xff", "row 199, column 299"]),
        (lambda stored: {**stored, WEIGHT: bits((200, 300), 0xFF)}, (128, 128), ["0x7f or 0xff", "row 199, column 299"]),
        (lambda stored: {**stored, WEIGHT: torch.ones(200, 300)}, (128, 128), ["has scales, but", "stored as F32"]),
        (lambda stored: {**stored, WEIGHT: bits((200,), 0)}, (128, 128), ["[200]", "two dimensions"]),
    ],
)  # fmt: skip
def test_a_weight_that_is_none(
    tmp_path: Path,
    spoil: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    blocks: tuple[int, int] | None,
    words: list[str],
) -> None:
    with pytest.raises(CheckpointError) as caught, source_of(tmp_path, spoil(drawn_module()[1]), blocks).open() as read:
        read(WEIGHT, (slice(0, 200), slice(0, 300)))
    for word in (WEIGHT, "model.safetensors", *words):
        assert word in str(caught.value)


def test_another_kind_of_fp8_is_refused(tmp_path: Path) -> None:
    _, stored = write_pair(tmp_path, "blocks")
    weights = load_file(stored / "model.safetensors")
    weights = {name: each for name, each in weights.items() if name != f"{WEIGHT}_scale_inv"}
    weights[WEIGHT] = torch.zeros(weights[WEIGHT].shape).to(torch.float8_e5m2)
    save_file(weights, stored / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj.weight .*F8_E5M2"):
        load(stored)
