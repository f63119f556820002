"""GPTQ, AWQ and compressed-tensors: what is read equals the floats that the format's definition gives."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from inflight.config.ranks import RankLayout
from inflight.config.weight_format import AWQ, COMPRESSED_TENSORS, GPTQ, GPTQ_V2
from inflight.distributed.thread_world import ThreadWorlds
from inflight.errors import CheckpointError
from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.weights import WeightSlot, WeightSlots
from inflight.model_loader.checkpoint import Checkpoint
from inflight.model_loader.packed_checkpoint import PackedCheckpoint
from tests.support.full_context_attention import load, run_prompt
from tests.support.gpu_layers import use_gpu_layers
from tests.support.model_zoo import write_model
from tests.support.quantized_checkpoints import Drawn, awq, draw, gptq, int_quantized, pack_quantized

PROMPT = torch.arange(9)
MODULE = "model.layers.0.mlp.up_proj"

Pack = Callable[[Drawn], dict[str, Tensor]]

GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def compressed_config(layout: str, bits: int, **weights: Any) -> dict[str, Any]:
    scheme = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": {**scheme, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


# name -> (weight format, how weights are drawn, how they are packed, (bits, group size, symmetric) read, None for floats)
CASES: dict[str, tuple[str, dict[str, Any], Pack, tuple[int, int, bool] | None]] = {
    "gptq int4": (GPTQ, {"bits": 4, "group_size": 32}, gptq, (4, 32, False)),
    "gptq int4 of 64": (GPTQ, {"bits": 4, "group_size": 64}, gptq, (4, 64, False)),
    "gptq int8": (GPTQ, {"bits": 8, "group_size": 32}, gptq, (8, 32, False)),
    "gptq symmetric": (GPTQ, {"bits": 4, "group_size": 32, "symmetric": True}, gptq, (4, 32, False)),
    "gptq v2": (GPTQ_V2, {"bits": 4, "group_size": 32}, lambda drawn: gptq(drawn, version=2), (4, 32, False)),
    "gptq v2 that calls itself v1": (
        GPTQ, {"bits": 4, "group_size": 32, "symmetric": True}, lambda drawn: gptq(drawn, version=2), (4, 32, False),
    ),
    "gptq per channel": (GPTQ, {"bits": 4, "group_size": 128}, gptq, (4, 128, False)),
    "gptq int8 per channel": (
        GPTQ, {"bits": 8, "group_size": 128, "symmetric": True, "lowest": 1}, gptq, (8, 128, True),
    ),
    "gptq act-order": (GPTQ, {"bits": 4, "group_size": 32, "act_order": True}, gptq, None),
    "gptq v2 act-order": (
        GPTQ_V2, {"bits": 4, "group_size": 32, "act_order": True}, lambda drawn: gptq(drawn, version=2), None,
    ),
    "gptq int8 act-order": (GPTQ, {"bits": 8, "group_size": 64, "act_order": True}, gptq, None),
    "gptq v2 act-order, symmetric, that calls itself v1": (
        GPTQ, {"bits": 4, "group_size": 32, "act_order": True, "symmetric": True}, lambda drawn: gptq(drawn, version=2), None,
    ),
    "gptq of 16": (GPTQ, {"bits": 4, "group_size": 16}, gptq, None),
    "gptq with a short last group": (GPTQ, {"bits": 4, "group_size": 96}, gptq, None),
    "awq": (AWQ, {"bits": 4, "group_size": 32}, awq, (4, 32, False)),
    "awq of 64": (AWQ, {"bits": 4, "group_size": 64}, awq, (4, 64, False)),
    "compressed int4": (
        COMPRESSED_TENSORS, {"bits": 4, "group_size": 32, "symmetric": True},
        lambda drawn: pack_quantized(drawn, zero_points="none"), (4, 32, False),
    ),
    "compressed int4, zero points": (COMPRESSED_TENSORS, {"bits": 4, "group_size": 32}, pack_quantized, (4, 32, False)),
    "compressed int4, zero points in bytes": (
        COMPRESSED_TENSORS, {"bits": 4, "group_size": 64}, lambda drawn: pack_quantized(drawn, zero_points="bytes"),
        (4, 64, False),
    ),
    "compressed int4 act-order": (
        COMPRESSED_TENSORS, {"bits": 4, "group_size": 32, "act_order": True},
        lambda drawn: pack_quantized(drawn, act_order=True), None,
    ),
    "compressed int8, packed": (COMPRESSED_TENSORS, {"bits": 8, "group_size": 32}, pack_quantized, (8, 32, False)),
    "compressed int8 per channel, packed": (
        COMPRESSED_TENSORS, {"bits": 8, "group_size": 128, "symmetric": True, "lowest": 1},
        lambda drawn: pack_quantized(drawn, zero_points="none"), (8, 128, True),
    ),
    "W8A8": (
        COMPRESSED_TENSORS, {"bits": 8, "group_size": 128, "symmetric": True, "lowest": 1}, int_quantized, (8, 128, True),
    ),
    "W8A8 with -128": (
        COMPRESSED_TENSORS, {"bits": 8, "group_size": 128, "symmetric": True}, int_quantized, (8, 128, True),
    ),
    "W8A8, a vector of scales": (
        COMPRESSED_TENSORS, {"bits": 8, "group_size": 128, "symmetric": True, "lowest": 1},
        lambda drawn: int_quantized(drawn, scale="vector"), (8, 128, True),
    ),
    "int8 in groups": (COMPRESSED_TENSORS, {"bits": 8, "group_size": 32, "symmetric": True}, int_quantized, (8, 32, False)),
}  # fmt: skip


def write_module(folder: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    save_file({f"{MODULE}.{suffix}": tensor for suffix, tensor in tensors.items()}, folder / "model.safetensors")
    return Checkpoint(folder)


def read(source: PackedCheckpoint, rows: slice = slice(None), columns: slice = slice(None)) -> QuantizedWeight | Tensor:
    with source.open() as read_part:
        return read_part(f"{MODULE}.weight", (rows, columns))


def floats(part: QuantizedWeight | Tensor) -> Tensor:
    return part.dequantize() if isinstance(part, QuantizedWeight) else part


@pytest.mark.parametrize("name", CASES)
def test_a_weight_is_that_of_its_definition(tmp_path: Path, name: str) -> None:
    weight_format, drawing, pack, form = CASES[name]
    drawn = draw(np.random.default_rng(1), 48, 128, **drawing)
    source = PackedCheckpoint(write_module(tmp_path, pack(drawn)), weight_format)
    stored = source.tensors[f"{MODULE}.weight"]
    assert list(source.tensors) == [f"{MODULE}.weight"]
    assert stored.shape == (48, 128)
    assert stored.is_quantized
    part = read(source)
    assert (part.format if isinstance(part, QuantizedWeight) else None) == form
    truth = drawn.weight()
    assert torch.equal(floats(part), truth)
    for rows in (slice(0, 24), slice(24, 48), slice(5, 13), slice(47, 48)):
        assert torch.equal(floats(read(source, rows)), truth[rows])
    for columns in (slice(0, 64), slice(64, 128), slice(32, 64)):  # of ranks: the groups may have to become smaller
        assert torch.equal(floats(read(source, columns=columns)), truth[:, columns])


def test_one_scale_for_all(tmp_path: Path) -> None:
    drawn = draw(np.random.default_rng(1), 48, 128, bits=8, group_size=128, symmetric=True, lowest=1)
    drawn.scales[:] = drawn.scales[0]
    source = PackedCheckpoint(write_module(tmp_path, int_quantized(drawn, scale="one")), COMPRESSED_TENSORS)
    assert torch.equal(floats(read(source, slice(7, 30))), drawn.weight()[7:30])


def test_columns_that_fill_no_word(tmp_path: Path) -> None:
    drawn = draw(np.random.default_rng(1), 20, 100, bits=4, group_size=20)
    source = PackedCheckpoint(write_module(tmp_path, pack_quantized(drawn)), COMPRESSED_TENSORS)
    assert torch.equal(floats(read(source)), drawn.weight())


def test_an_order_that_is_declared_and_not_used(tmp_path: Path) -> None:
    drawn = draw(np.random.default_rng(1), 16, 64, bits=4, group_size=32)
    tensors = {**pack_quantized(drawn), "weight_g_idx": torch.full((64,), -1, dtype=torch.int32)}
    part = read(PackedCheckpoint(write_module(tmp_path, tensors), COMPRESSED_TENSORS))
    assert isinstance(part, QuantizedWeight)
    assert torch.equal(part.dequantize(), drawn.weight())


def test_a_cut_within_the_smallest_group_is_refused(tmp_path: Path) -> None:
    drawn = draw(np.random.default_rng(1), 16, 192, bits=4, group_size=64)
    source = PackedCheckpoint(write_module(tmp_path, gptq(drawn)), GPTQ)
    with pytest.raises(CheckpointError) as caught:
        read(source, columns=slice(48, 96))
    for word in (
        MODULE,
        "192 columns",
        "groups of 64",
        "48",
        "multiple of 32",
        "tensor_parallel_size of 1 or 2 or 3 or 6,",
    ):
        assert word in str(caught.value)


def change(**tensors: Tensor | None) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Replaces, adds, or (None) takes away."""
    return lambda stored: {name: tensor for name, tensor in {**stored, **tensors}.items() if tensor is not None}


I32 = torch.int32


@pytest.mark.parametrize(
    ("weight_format", "pack", "spoil", "words"),
    [
        (GPTQ, gptq, change(qzeros=None), ["lacks model.layers.0.mlp.up_proj.qzeros"]),
        (GPTQ, gptq, change(weight=torch.ones(2, 2)), ["twice"]),
        (GPTQ, gptq, change(scales=torch.ones(2, 47)), ["bits", "scales F32 [2, 47]"]),
        (GPTQ, gptq, change(scales=torch.ones(3, 48)), ["qzeros should be I32 [3, 6]"]),
        (GPTQ, gptq, change(scales=torch.ones(2, 48, dtype=I32)), ["scales should be BF16 or F16 or F32 [2, 48]"]),
        (GPTQ, gptq, change(qzeros=torch.zeros(2, 3, dtype=I32)), ["2 bits", "only 4 and 8"]),
        (GPTQ, gptq, change(qzeros=torch.zeros(2, 0, dtype=I32)), ["not be empty"]),
        (GPTQ, gptq, change(qweight=torch.zeros(8, 48)), ["qweight should be I32 [8, 48]"]),
        (GPTQ, gptq, change(qweight=torch.zeros(384, dtype=I32)), ["two dimensions"]),
        (GPTQ, gptq, change(g_idx=torch.zeros(63, dtype=I32)), ["g_idx should be I32 [64]"]),
        (GPTQ, gptq, change(g_idx=torch.full((64,), 2, dtype=I32)), ["g_idx", "outside [0, 2)"]),
        (GPTQ, gptq, change(g_idx=torch.full((64,), -1, dtype=I32)), ["g_idx", "outside [0, 2)"]),
        (AWQ, awq, change(qzeros=torch.zeros(2, 7, dtype=I32)), ["qzeros should be I32 [2, 6]"]),
        (AWQ, awq, change(qweight=torch.zeros(64, 6)), ["qweight should be I32"]),
        (AWQ, awq, change(scales=torch.ones(3, 48), qzeros=torch.zeros(3, 6, dtype=I32)), ["divided into 3 equal groups"]),
        (COMPRESSED_TENSORS, pack_quantized, change(weight_packed=None), ["lacks model.layers.0.mlp.up_proj.weight_packed"]),
        (COMPRESSED_TENSORS, pack_quantized, change(weight_shape=None), ["weight_shape"]),
        (COMPRESSED_TENSORS, pack_quantized, change(weight_shape=torch.tensor([48, 70])), ["neither 4 nor 8 bits"]),
        (COMPRESSED_TENSORS, pack_quantized, change(weight_shape=torch.tensor([-48, -64])), ["not be empty"]),
        (COMPRESSED_TENSORS, pack_quantized, change(weight_shape=torch.tensor([47, 64])), ["weight_packed should be"]),
        (COMPRESSED_TENSORS, pack_quantized, change(weight_shape=torch.tensor([48])), ["weight_shape should be"]),
        (COMPRESSED_TENSORS, pack_quantized, change(weight_scale=torch.ones(47, 2)), ["the shape [48, groups]"]),
        (COMPRESSED_TENSORS, pack_quantized, change(weight_scale=torch.ones(48, 3)), ["weight_zero_point should be"]),
        (COMPRESSED_TENSORS, pack_quantized, change(weight_scale=torch.ones(48, 0)), ["weight_zero_point should be"]),
        (COMPRESSED_TENSORS, int_quantized, change(weight=torch.ones(48, 64)), ["weight should be I8", "F32"]),
        (COMPRESSED_TENSORS, int_quantized, change(weight_scale=torch.ones(48, 3)), ["divided into 3 equal groups"]),
        (COMPRESSED_TENSORS, int_quantized, change(weight_g_idx=torch.ones(3, dtype=I32)), ["weight_g_idx should be"]),
    ],
)  # fmt: skip
def test_a_module_that_is_none(
    tmp_path: Path,
    weight_format: str,
    pack: Pack,
    spoil: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    words: list[str],
) -> None:
    bits = 8 if pack is int_quantized else 4
    tensors = spoil(pack(draw(np.random.default_rng(1), 48, 64, bits=bits, group_size=32)))
    with pytest.raises(CheckpointError) as caught:
        read(PackedCheckpoint(write_module(tmp_path, tensors), weight_format))
    for word in (MODULE, "model.safetensors", *words):
        assert word in str(caught.value)


# ---- whole models ----------------------------------------------------------------------------------------------------

TINY = LlamaConfig(
    vocab_size=203,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    attention_bias=True,
)


def write_pair(tmp_path: Path, quantization: dict[str, Any], pack: Pack, **drawing: Any) -> tuple[Path, Path]:
    """The same model quantized, and plain with the dequantized weights. The first layer's o_proj and the head stay plain."""
    plain = write_model(TINY, tmp_path / "plain", seed=3)
    random = np.random.default_rng(3)
    weights = load_file(plain / "model.safetensors")
    packed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight" and "_proj" in module and module != "model.layers.0.self_attn.o_proj":
            drawn = draw(random, *tensor.shape, **drawing)
            weights[name] = drawn.weight()
            packed |= {f"{module}.{part}": value for part, value in pack(drawn).items()}
        else:
            packed[name] = tensor
    save_file(weights, plain / "model.safetensors")
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    save_file(packed, quantized / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return plain, quantized


@pytest.mark.parametrize(
    ("quantization", "pack", "drawing"),
    [
        (GPTQ_CONFIG, gptq, {"bits": 4, "group_size": 32}),
        (AWQ_CONFIG, awq, {"bits": 4, "group_size": 32}),
        (compressed_config("pack-quantized", 4), pack_quantized, {"bits": 4, "group_size": 32}),
        (
            compressed_config("int-quantized", 8, strategy="channel"),
            int_quantized,
            {"bits": 8, "group_size": 128, "symmetric": True},
        ),
    ],
    ids=["gptq", "awq", "compressed int4", "W8A8"],
)
def test_a_quantized_model_is_that_of_its_weights(
    tmp_path: Path, quantization: dict[str, Any], pack: Pack, drawing: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, quantized = write_pair(tmp_path, quantization, pack, **drawing)
    truth = run_prompt(load(plain), PROMPT)
    # the kernels quantize activations, too: 1 % is theirs
    assert (run_prompt(load(quantized), PROMPT) - truth).norm() < 0.03 * truth.norm()
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "off")
    torch.testing.assert_close(run_prompt(load(quantized), PROMPT), truth, rtol=1e-5, atol=1e-5)
    use_gpu_layers(monkeypatch)
    model = load(quantized)
    torch.testing.assert_close(run_prompt(model, PROMPT), truth, rtol=1e-4, atol=1e-4)
    assert model.tune(1), "weights stay quantized"
    torch.testing.assert_close(run_prompt(model, PROMPT[:1]), truth[:1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("quantization", "pack", "drawing", "scales"),
    [
        (GPTQ_CONFIG, gptq, {"bits": 4, "group_size": 32}, "scales"),
        (AWQ_CONFIG, awq, {"bits": 4, "group_size": 32}, "scales"),
        (compressed_config("pack-quantized", 4), pack_quantized, {"bits": 4, "group_size": 32}, "weight_scale"),
    ],
    ids=["gptq", "awq", "compressed int4"],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_a_scale_that_is_not_finite_is_refused(
    tmp_path: Path,
    quantization: dict[str, Any],
    pack: Pack,
    drawing: dict[str, Any],
    scales: str,
    value: float,
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", kernels)
    _, quantized = write_pair(tmp_path, quantization, pack, **drawing)
    tensors = load_file(quantized / "model.safetensors")
    tensors[f"{MODULE}.{scales}"][1, 1] = value
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{MODULE}\.\w+ .*NaN"):
        load(quantized)


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> dict[str, QuantizedWeight]:
    """Makes linear layers take quantized weights. Name -> what the layer was given; its floats go where floats would go."""
    given: dict[str, QuantizedWeight] = {}

    def taking(name: str, slot: WeightSlot) -> WeightSlot:
        def accept(weight: QuantizedWeight | Tensor) -> bool:
            if isinstance(weight, QuantizedWeight):
                given[name] = weight
                slot.destination.copy_(weight.dequantize())
            return isinstance(weight, QuantizedWeight)

        return replace(slot, accept=accept if name.endswith(".weight") else None)

    for kind in (ColumnParallelLinear, RowParallelLinear):
        plain = kind.weight_slots

        def weight_slots(self: Any, prefix: str, plain: Any = plain) -> WeightSlots:  # Any: a layer, and its own method
            for name, slot in plain(self, prefix):
                yield name, taking(name, slot)

        monkeypatch.setattr(kind, "weight_slots", weight_slots)
    return given


def test_a_layer_that_takes_a_quantized_weight_gets_it(tmp_path: Path, accepted: dict[str, QuantizedWeight]) -> None:
    plain, quantized = write_pair(tmp_path, GPTQ_CONFIG, gptq, bits=4, group_size=64)
    truth = run_prompt(load(plain), PROMPT)
    assert not accepted
    assert torch.equal(run_prompt(load(quantized), PROMPT), truth)
    assert len(accepted) == 13  # 7 of each layer, less the o_proj that is plain
    assert {weight.format for weight in accepted.values()} == {(4, 64, False)}


def test_ranks_get_their_parts(tmp_path: Path, accepted: dict[str, QuantizedWeight]) -> None:
    plain, quantized = write_pair(tmp_path, GPTQ_CONFIG, gptq, bits=4, group_size=64)
    weights = load_file(plain / "model.safetensors")
    worlds = ThreadWorlds(RankLayout(2, 1), timeout_seconds=60)
    for rank in range(2):
        accepted.clear()
        load(quantized, tp=worlds.of(rank).tensor_parallel_group("model"))
        up, down = f"{MODULE}.weight", "model.layers.1.mlp.down_proj.weight"
        assert torch.equal(accepted[up].dequantize(), weights[up][64 * rank : 64 * rank + 64])
        assert torch.equal(accepted[down].dequantize(), weights[down][:, 64 * rank : 64 * rank + 64])
        assert accepted["model.layers.1.self_attn.o_proj.weight"].group_size == 32  # a rank's half of a group of 64


def test_what_has_no_quantized_form_is_said_once(
    tmp_path: Path, accepted: dict[str, QuantizedWeight], caplog: pytest.LogCaptureFixture
) -> None:
    plain, quantized = write_pair(tmp_path, GPTQ_CONFIG, gptq, bits=4, group_size=16)
    with caplog.at_level(logging.WARNING, "inflight.model_loader.loader"):
        ours = run_prompt(load(quantized), PROMPT)
        assert torch.equal(ours, run_prompt(load(plain), PROMPT))
    assert not accepted
    (record,) = caplog.records
    for word in (
        "13 quantized weights are held as float32",
        "act-order",
        "model.layers.0.self_attn.q_proj.weight",
        "5 more",
    ):
        assert word in record.getMessage()


@pytest.mark.parametrize(
    ("name", "content", "pack"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False, "sym": False}, gptq),
        ("quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}, awq),
    ],
)
def test_a_format_that_a_file_beside_config_json_names(
    tmp_path: Path, name: str, content: dict[str, Any], pack: Pack
) -> None:
    plain, quantized = write_pair(tmp_path, {}, pack, bits=4, group_size=32)
    (quantized / "config.json").write_text((plain / "config.json").read_text())
    (quantized / name).write_text(json.dumps(content))
    truth = run_prompt(load(plain), PROMPT)
    assert (run_prompt(load(quantized), PROMPT) - truth).norm() < 0.03 * truth.norm()


def test_a_format_that_config_json_does_not_name_is_refused(tmp_path: Path) -> None:
    _, quantized = write_pair(tmp_path, GPTQ_CONFIG, gptq, bits=4, group_size=32)
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"lacks model.*\(model.*qweight\)"):
        load(quantized)
