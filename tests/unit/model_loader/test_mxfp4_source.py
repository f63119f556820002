"""MXFP4 in safetensors: the weights are those of transformers' own dequantization, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from inflight.config.weight_format import MXFP4
from inflight.errors import CheckpointError
from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.model_loader.checkpoint import Checkpoint
from inflight.model_loader.mxfp4 import MOST_EXPONENT, mxfp4_weight
from inflight.model_loader.mxfp4_source import Mxfp4Source
from inflight.model_loader.stacked_experts import StackedExperts
from tests.support.close_logits import FLOAT32_TOLERANCE, relative_difference
from tests.support.full_context_attention import load, run_prompt
from tests.support.model_zoo import reference_model
from tests.support.mxfp4_checkpoints import HIDDEN_SIZE, NUM_EXPERTS, SIZE, write_mxfp4

EXPERTS = "model.layers.1.mlp.experts"
RENAMES = [(f".mlp.experts.{stack}", f".mlp.experts.alternating.{stack}") for stack in ("gate_up_proj", "down_proj")]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_mxfp4(tmp_path_factory.mktemp("mxfp4"))


@pytest.fixture
def folder(written: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the folder in MXFP4, to be changed."""
    return Path(shutil.copytree(written[1], tmp_path / "model"))


def change(folder: Path, *, without: str = "-", **added: Tensor) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if not name.startswith(without)}
    save_file({**kept, **added}, folder / "model.safetensors", {"format": "pt"})


def test_the_weights_of_each_expert(written: tuple[Path, Path]) -> None:
    plain, packed = written
    truth = load_file(plain / "model.safetensors")
    gate_up, down = truth[f"{EXPERTS}.gate_up_proj"].mT, truth[f"{EXPERTS}.down_proj"].mT
    source = StackedExperts(Mxfp4Source(Checkpoint(packed, renames=RENAMES)))
    with source.open() as read:
        for expert in range(NUM_EXPERTS):
            wanted = {"gate_proj": gate_up[expert, ::2], "up_proj": gate_up[expert, 1::2], "down_proj": down[expert]}
            for projection, weight in wanted.items():
                name = f"{EXPERTS}.{expert}.{projection}.weight"
                stored = source.tensors[name]
                assert (stored.shape, stored.dtype, stored.is_quantized) == (tuple(weight.shape), MXFP4, True)
                for rows, columns in ((slice(0, 64), slice(0, 64)), (slice(3, 40), slice(32, 64))):
                    part = read(name, (rows, columns))
                    assert isinstance(part, QuantizedWeight)
                    assert torch.equal(part.dequantize(), weight[rows, columns])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_as_floats_they_are_those_that_transformers_makes(written: tuple[Path, Path], dtype: torch.dtype) -> None:
    stored = load_file(written[1] / "model.safetensors")
    source = Mxfp4Source(Checkpoint(written[1], keeps_names=True), dtype)
    with source.open() as read:
        for stack, shape in (("gate_up_proj", (HIDDEN_SIZE, 2 * SIZE)), ("down_proj", (SIZE, HIDDEN_SIZE))):
            name = f"{EXPERTS}.{stack}"
            truth = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=dtype)
            assert source.tensors[name].shape == truth.shape == (NUM_EXPERTS, *shape)
            assert torch.equal(read(name, tuple(slice(0, size) for size in truth.shape)), truth)
            part = slice(1, 3), slice(5, 37), slice(2, 60)
            assert torch.equal(read(name, part), truth[part])


def test_every_number_with_every_scale() -> None:
    exponents = torch.arange(MOST_EXPONENT + 1, dtype=torch.uint8)
    blocks = torch.arange(16, dtype=torch.uint8).repeat(len(exponents), 1, 1) * 17  # [rows, groups, 16]
    indices = torch.arange(16, dtype=torch.uint8).repeat_interleave(2).repeat(len(exponents), 1)
    truth = convert_moe_packed_tensors(blocks[None], exponents[None, :, None], dtype=torch.float32)[0].T
    assert torch.equal(mxfp4_weight(indices, exponents[:, None]).dequantize(), truth)


@torch.inference_mode()
def test_logits(written: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """In plain torch, which computes with the exact weights. The kernels round activations to 8 bits."""
    prompt = torch.arange(3, 60)
    truth = reference_model(written[0])(prompt[None]).logits[0]
    with_kernels = run_prompt(load(written[1]), prompt)
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "off")
    assert relative_difference(run_prompt(load(written[1]), prompt), truth) < FLOAT32_TOLERANCE
    assert float((with_kernels - truth).square().mean().sqrt() / truth.std()) < 0.05


def test_what_the_user_is_told(written: tuple[Path, Path]) -> None:
    source = Mxfp4Source(Checkpoint(written[1]))
    assert source.notice is not None and "4 tensors of experts are stored in MXFP4" in source.notice
    assert "held in 4 bits" in source.notice
    assert source.bits_in_memory is not None and 4 < source.bits_in_memory < 16
    divided = StackedExperts(source)
    assert (divided.notice, divided.bits_in_memory) == (source.notice, source.bits_in_memory)
    floats = Mxfp4Source(Checkpoint(written[1]), torch.bfloat16)
    assert "held in 16 bits" in str(floats.notice)


@pytest.mark.parametrize("byte", [249, 255])
def test_a_scale_that_is_nan_or_too_large_is_refused_with_its_place(folder: Path, byte: int) -> None:
    scales = load_file(folder / "model.safetensors")[f"{EXPERTS}.gate_up_proj_scales"]
    scales[2, 51, 1] = byte
    change(folder, **{f"{EXPERTS}.gate_up_proj_scales": scales})
    with pytest.raises(CheckpointError, match=rf"_scales .*{byte} .*expert 2, row 51, group 1"):
        load(folder)


def test_a_weight_in_both_forms_is_refused(folder: Path) -> None:
    change(folder, **{f"{EXPERTS}.down_proj": torch.ones(4, 96, 64)})
    with pytest.raises(CheckpointError, match=r"down_proj .*MXFP4"):
        Mxfp4Source(Checkpoint(folder, keeps_names=True))


@pytest.mark.parametrize(
    ("without", "added", "message"),
    [
        ("gate_up_proj_scales", {}, r"gate_up_proj_blocks is in .*, but .*gate_up_proj_scales is missing"),
        ("down_proj_blocks", {}, r"down_proj_scales is in .*, but .*down_proj_blocks is missing"),
        (
            "-",
            {"down_proj": torch.ones(4, 96, 64)},
            r"there twice: .*experts\.down_proj_blocks in .*, and .*experts\.down_proj in ",
        ),
        (
            "-",
            {"down_proj_scales": torch.ones(4, 64, 2, dtype=torch.uint8)},
            r"found .*_blocks U8 \[4, 64, 3, 16\] and .*_scales U8 \[4, 64, 2\]",
        ),
        (
            "-",
            {"down_proj_scales": torch.ones(4, 64, 3)},
            r"_blocks U8 \[4, 64, 3, 16\] and .*_scales F32 \[4, 64, 3\]",
        ),
        ("-", {"down_proj_blocks": torch.ones(64, 3, 16, dtype=torch.uint8)}, r"found .*_blocks U8 \[64, 3, 16\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    folder: Path, without: str, added: dict[str, Tensor], message: str
) -> None:
    change(folder, without=f"{EXPERTS}.{without}", **{f"{EXPERTS}.{name}": each for name, each in added.items()})
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_a_checkpoint_that_is_not_in_mxfp4_is_refused(written: tuple[Path, Path], folder: Path) -> None:
    shutil.copy(written[0] / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"quantization_config"):
        load(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    load(folder)
