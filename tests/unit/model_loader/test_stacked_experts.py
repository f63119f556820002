"""Tensors with the weights of all experts, and checkpoints whose experts do not fit config.json."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inflight.config.parse_architecture import parse_architecture
from inflight.errors import CheckpointError
from inflight.hub import read_config
from inflight.model_loader.checkpoint import Checkpoint
from inflight.model_loader.stacked_experts import StackedExperts
from tests.support.full_context_attention import load, run_prompt
from tests.support.model_zoo import FAMILY_CONFIGS, write_model
from tests.support.vision_models import VISION_CONFIGS, write_vision_model

PROMPT = torch.arange(3, 20)
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(FAMILY_CONFIGS["qwen3_moe"][0], tmp_path_factory.mktemp("experts") / "model", seed=3)


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy to be changed."""
    return Path(shutil.copytree(written, tmp_path / "model"))


def change(folder: Path, *, without: list[str] = [], **added: Tensor) -> None:  # noqa: B006
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if not name.startswith(tuple(without))}
    save_file({**kept, **added}, folder / "model.safetensors", metadata={"format": "pt"})


def stacked(folder: Path, layer: int) -> dict[str, Tensor]:
    weights = load_file(folder / "model.safetensors")
    prefix = f"model.layers.{layer}.mlp.experts"

    def of_all(*projections: str) -> Tensor:
        rows = [torch.cat([weights[f"{prefix}.{e}.{name}.weight"] for name in projections]) for e in range(8)]
        return torch.stack(rows)

    return {f"{prefix}.gate_up_proj": of_all("gate_proj", "up_proj"), f"{prefix}.down_proj": of_all("down_proj")}


@torch.inference_mode()
def test_stacked_tensors_are_the_weights_of_the_experts(written: Path, folder: Path) -> None:
    change(folder, without=[f"{EXPERTS}."], **stacked(folder, 1))  # one layer of two
    assert torch.equal(run_prompt(load(folder), PROMPT), run_prompt(load(written), PROMPT))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("gate_up_proj", (5, 224, 64), r"gate_proj\.weight .*\[32, 224\].*\[112, 64\]"),  # not transposed
        ("gate_up_proj", (5, 64, 223), r"should be \[experts, columns, rows\], with the rows of gate_proj and up_proj"),
        ("gate_up_proj_bias", (5, 224, 1), r"should be \[experts, rows\], with the rows of gate_proj and up_proj"),
        ("down_proj_bias", (4, 64), r"lacks .*experts\.4\.down_proj\.bias"),
        ("down_proj_bias", (6, 64), r"does not account for: .*experts\.5\.down_proj\.bias"),
    ],
)
def test_experts_of_gpt_oss_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, shape: tuple[int, ...], message: str
) -> None:
    folder = write_model(FAMILY_CONFIGS["gpt_oss"][0], tmp_path / "model", seed=3)
    change(folder, **{f"{EXPERTS}.{name}": torch.ones(shape)})
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("without", "added", "message"),
    [
        ([f"{EXPERTS}.7."], {}, r"lacks .*experts\.7\.gate_proj\.weight"),
        ([], {f"{EXPERTS}.8.up_proj.weight": (32, 64)}, r"does not account for: .*experts\.8\.up_proj\.weight"),
        (
            [f"{EXPERTS}.2.up"],
            {f"{EXPERTS}.2.up_proj.weight": (40, 64)},
            r"experts\.2\.up_proj.*\[40, 64\].*\[32, 64\]",
        ),
        (
            [f"{EXPERTS}."],
            {f"{EXPERTS}.gate_up_proj": (7, 64, 64), f"{EXPERTS}.down_proj": (8, 64, 32)},
            r"lacks .*\.7\.",
        ),
        ([f"{EXPERTS}."], {f"{EXPERTS}.gate_up_proj": (8, 63, 64)}, r"shape \[8, 63, 64\]; it should be"),
        ([f"{EXPERTS}."], {f"{EXPERTS}.gate_up_proj": (512, 64)}, r"shape \[512, 64\]; it should be"),
        (
            [],
            {f"{EXPERTS}.gate_up_proj": (8, 64, 64)},
            r"twice: .*\.gate_up_proj in .*, and .*\.0\.gate_proj\.weight in",
        ),
    ],
)
def test_experts_that_do_not_fit_are_refused(
    folder: Path, without: list[str], added: dict[str, tuple[int, ...]], message: str
) -> None:
    change(folder, without=without, **{name: torch.ones(shape) for name, shape in added.items()})
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_rows_that_may_be_columns(tmp_path: Path) -> None:
    """Released checkpoints of Qwen3-VL have them, and those that transformers saves may have the usual rows."""
    config = VISION_CONFIGS["qwen3_vl_moe"][0]
    usual = write_vision_model(config, tmp_path / "usual", seed=3)
    released = Path(shutil.copytree(usual, tmp_path / "released"))
    weights = load_file(usual / "model.safetensors")
    of_experts = [name for name in weights if ".mlp.experts." in name]
    assert of_experts and all("gate_up_proj" in name or "down_proj" in name for name in of_experts)
    change(released, **{name: weights[name].transpose(1, 2).contiguous() for name in of_experts})
    renames = parse_architecture(read_config(usual)).renames
    sources = [StackedExperts(Checkpoint(folder, renames=renames)) for folder in (usual, released)]
    shapes = [{name: tensor.shape for name, tensor in source.tensors.items()} for source in sources]
    assert shapes[0] == shapes[1]
    with sources[0].open() as one, sources[1].open() as other:
        for name in ("gate_proj", "up_proj", "down_proj"):
            found = [
                read(f"model.layers.1.mlp.experts.5.{name}.weight", (slice(3, 9), slice(0, 16)))
                for read in (one, other)
            ]
            assert all(isinstance(each, Tensor) for each in found)
            assert torch.equal(*found)
