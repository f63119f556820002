"""mmproj files: their towers compute what transformers computes with the same weights in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.config.vision import Grid
from inflight.errors import CheckpointError
from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.model_loader.gguf_mmproj import MmprojSource
from tests.support.gguf_files import floats
from tests.support.mmproj_files import MODELS, Files, write_mmproj_model
from tests.support.vision_models import draw_image, encode, load, reference_features, reference_model
from tests.unit.models.test_encoders import difference

GRIDS: dict[str, Grid] = {"smolvlm": (1, 6, 6), "gemma3": (1, 6, 6), "gemma4": (1, 6, 9), "gemma4_experts": (1, 6, 9)}
OTHER_GRID: Grid = (1, 4, 10)


def features(family: str, files: Files) -> tuple[Tensor, Tensor]:
    """Of one image: ours from the two files, those of transformers from the folder."""
    model = load(files.text, mmproj=files.mmproj)
    assert model.tower is not None
    spec = model.tower.spec
    grid = GRIDS.get(family, OTHER_GRID)
    pixels = draw_image(spec, grid, 5)
    return encode(model, pixels, grid), reference_features(reference_model(files.folder), pixels, grid)


TOWERS = [family for family in MODELS if family != "qwen3_vl_moe"]  # whose tower is that of qwen3_vl


@pytest.mark.parametrize(("family", "kind"), [("smolvlm", "F32"), *((family, "F16") for family in TOWERS)])
def test_embeddings(family: str, kind: str, tmp_path: Path) -> None:
    found, expected = features(family, write_mmproj_model(tmp_path, family, kind))
    assert difference([found], [expected]) < 1e-4
    assert float(expected.std()) > 0.3, "embeddings that are all alike would agree whatever the tower does"


@pytest.mark.parametrize("family", TOWERS)
def test_quantized_towers(family: str, tmp_path: Path) -> None:
    """The truth has exactly the weights for which the integers stand; what differs are activations in 8 bits."""
    files = write_mmproj_model(tmp_path, family, "Q8_0")
    source = MmprojSource(files.mmproj)
    name = next(name for name, tensor in source.tensors.items() if tensor.is_quantized and ".mlp." in name)
    with source.open() as read:
        assert isinstance(read(name, (slice(None), slice(None))), QuantizedWeight)
    found, expected = features(family, files)
    assert float(F.cosine_similarity(found.flatten(), expected.flatten(), dim=0)) > 0.999


def test_swapped_names_of_old_files(tmp_path: Path) -> None:
    files = write_mmproj_model(tmp_path, "smolvlm", swapped=True)
    found, expected = features("smolvlm", files)
    assert difference([found], [expected]) < 1e-4


def test_parts_of_a_tensor(tmp_path: Path) -> None:
    """Ranks and fused layers read rows or columns of a weight that is in three tensors."""
    files = write_mmproj_model(tmp_path, "qwen2_5_vl")
    source = MmprojSource(files.mmproj)
    name = "model.visual.blocks.1.attn.qkv"
    with source.open() as read:
        third = source.tensors[f"{name}.weight"].shape[0] // 3
        rows = [read(f"{name}.weight", (slice(i * third, (i + 1) * third), slice(None))) for i in range(3)]
        part = read(f"{name}.weight", (slice(third + 8, third + 24), slice(16, 48)))
        bias = read(f"{name}.bias", (slice(third, 2 * third),))
        patches = read("model.visual.patch_embed.proj.weight", (slice(3, 9), *[slice(None)] * 4))
    truth = dict(reference_model(files.folder).named_parameters())
    weight = truth[f"{name}.weight"]
    assert torch.equal(torch.cat([each for each in rows if isinstance(each, Tensor)]), weight)
    assert isinstance(part, Tensor) and torch.equal(part, weight[third + 8 : third + 24, 16:48])
    assert isinstance(bias, Tensor) and torch.equal(bias, truth[f"{name}.bias"][third : 2 * third])
    assert isinstance(patches, Tensor) and torch.equal(patches, truth["model.visual.patch_embed.proj.weight"][3:9])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"v.blk.0.ls1.weight": (64,)}, r"v\.blk\.0\.ls1\.weight"),  # a scale that no supported tower has
        ({"v.post_ln.weight": None}, r"lacks model\.visual\.merger\.norm\.weight.*in .*mmproj.*--language-model-only"),
        ({"v.position_embd.weight": (48, 64)}, r"model\.visual\.pos_embed\.weight .* has shape \[48, 64\]"),
        ({"v.deepstack.1.fc1.weight": (256, 256)}, r"v\.deepstack\.1\.fc1\.weight"),  # of a layer without features
        ({"v.patch_embd.weight.1": (64, 3, 4, 5)}, "shapes or types differ"),
        ({"v.blk.0.attn_q.weight": (64, 64)}, r"has v\.blk\.0\.attn_q\.weight, but queries, keys and values"),
    ],
)
def test_a_file_with_other_tensors_is_refused(
    changes: dict[str, tuple[int, ...] | None], says: str, tmp_path: Path
) -> None:
    stored = {name: None if shape is None else floats(torch.zeros(shape)) for name, shape in changes.items()}
    files = write_mmproj_model(tmp_path, "qwen3_vl", changes=stored)
    with pytest.raises(CheckpointError, match=says):
        load(files.text, mmproj=files.mmproj)


def test_tensors_for_sounds_are_left_out(tmp_path: Path) -> None:
    sounds = {"a.blk.0.ln1.weight": floats(torch.zeros(4)), "mm.a.fc.weight": floats(torch.zeros(4, 4))}
    files = write_mmproj_model(tmp_path, "qwen3_vl", changes=sounds)
    assert load(files.text, mmproj=files.mmproj).tower is not None
