"""Each kind of tower in an mmproj file: its specification, and settings that a file leaves out or that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.config.gguf_config import read_model_config
from inflight.config.gguf_file import read_part
from inflight.config.gguf_mmproj import mmproj_fields, projector_of
from inflight.config.parse_architecture import parse_architecture
from inflight.config.vision import Qwen25VisionSpec
from inflight.errors import CheckpointError, UnsupportedModelError
from tests.support.gguf_files import Number, floats, write_gguf
from tests.support.mmproj_files import MODELS, write_mmproj_model
from tests.support.vision_models import load


@pytest.mark.parametrize("family", MODELS)
def test_the_tower_is_that_of_the_folder(family: str, tmp_path: Path) -> None:
    files = write_mmproj_model(tmp_path, family)
    found = parse_architecture(read_model_config(files.text, mmproj=files.mmproj)).vision
    expected = parse_architecture(read_model_config(files.folder)).vision
    assert found is not None and expected is not None
    differing = {
        name: (value, getattr(expected, name))
        for name, value in vars(found).items()
        if value != getattr(expected, name)
    }
    eps, other = differing.pop("eps", (0.0, 0.0))
    assert not differing and eps == pytest.approx(other, rel=1e-6)  # it is a float of 32 bits in the file


def keys_of_released_models(projector: str, **more: Any) -> dict[str, Any]:
    """Without the keys that llama.cpp's converter does not write for them."""
    numbers = {
        "image_size": 896, "patch_size": 14, "embedding_length": 64, "feed_forward_length": 96, "block_count": 32,
        "projection_dim": 256, "attention.head_count": 4,
    }  # fmt: skip
    colors = {name: Number("f", [0.5, 0.5, 0.5]) for name in ("image_mean", "image_std")}
    return {
        "general.architecture": "clip",
        "clip.has_vision_encoder": True,
        "clip.projector_type": projector,
        "clip.use_gelu": True,
        **{f"clip.vision.{name}": Number("I", value) for name, value in numbers.items()},
        **{f"clip.vision.{name}": value for name, value in colors.items()},
        "clip.vision.attention.layer_norm_epsilon": Number("f", 1e-6),
        **more,
    }


def processor_of(path: Path) -> dict[str, object]:
    file = read_part(path)
    return projector_of(file).processor(mmproj_fields(file))


def test_settings_that_a_file_leaves_out_are_those_of_the_released_models(tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    write_gguf(path, keys_of_released_models("gemma3"), {})
    assert processor_of(path)["image_seq_length"] == 256
    write_gguf(path, keys_of_released_models("qwen2.5vl_merger", **{"clip.vision.n_wa_pattern": Number("I", 8)}), {})
    assert processor_of(path)["size"] == {"shortest_edge": 3136, "longest_edge": 12_845_056}
    write_gguf(path, keys_of_released_models("qwen3vl_merger"), {})
    assert processor_of(path)["size"] == {"shortest_edge": 65_536, "longest_edge": 16_777_216}
    more = {"clip.vision.projector.scale_factor": Number("I", 4), "clip.vision.image_size": Number("I", 512)}
    write_gguf(path, keys_of_released_models("idefics3", **more, **{"clip.vision.patch_size": Number("I", 16)}), {})
    found = processor_of(path)
    assert found["image_seq_len"] == 64 and found["size"] == {"longest_edge": 2048}


def test_gemma_4_is_read_as_released(tmp_path: Path) -> None:
    """Files have no key for most tokens of an image, nor for tokens of images that see each other."""
    for family, sees_whole_images in (("gemma4", False), ("gemma4_experts", True)):
        files = write_mmproj_model(tmp_path / family, family)
        assert processor_of(files.mmproj)["max_soft_tokens"] == 280
        config = parse_architecture(read_model_config(files.text, mmproj=files.mmproj))
        mixers = [layer.mixer for layer in config.layers]
        assert any(getattr(mixer, "sees_whole_images", False) for mixer in mixers) == sees_whole_images


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"v.position_embd.weight": None}, r"v\.position_embd\.weight has the shape \[\]"),
        ({"v.position_embd.weight": (300, 64)}, r"has the shape \[300, 64\], and not that of two tables"),
        ({"v.blk.1.attn_k.input_max": None}, r"lacks v\.blk\.1\.attn_k\.input_max"),
        ({"v.blk.0.out_scale.weight": (64,)}, r"v\.blk\.0\.out_scale\.weight"),
        ({"v.patch_embd.weight": (64, 3, 4, 5)}, r"input_proj\.weight .* has shape \[64, 60\]"),
    ],
)
def test_other_tensors_of_gemma_4_are_refused(
    changes: dict[str, tuple[int, ...] | None], says: str, tmp_path: Path
) -> None:
    stored = {name: None if shape is None else floats(torch.zeros(shape)) for name, shape in changes.items()}
    files = write_mmproj_model(tmp_path, "gemma4", changes=stored)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=says):
        load(files.text, mmproj=files.mmproj)


def test_windows_of_qwen2_5(tmp_path: Path) -> None:
    files = write_mmproj_model(tmp_path, "qwen2_5_vl", tower={"n_wa_pattern": Number("I", 0), "window_size": None})
    found = parse_architecture(read_model_config(files.text, mmproj=files.mmproj)).vision
    assert isinstance(found, Qwen25VisionSpec)
    assert found.full_layers == (0, 1, 2, 3)
    assert found.window == 112 // 2 // 4


@pytest.mark.parametrize(
    ("family", "tower", "says"),
    [
        ("smolvlm", {"projector.scale_factor": None}, r"clip\.vision\.projector\.scale_factor is missing"),
        ("smolvlm", {"embedding_length": Number("i", -4)}, r"embedding_length=-4"),
        ("gemma3", {"projector.scale_factor": Number("I", 9)}, "scale_factor=9 is more than the patches of a row"),
        ("gemma3", {"image_size": Number("I", 3)}, "image_size=3 is less than"),
        ("gemma4", {"attention.head_count": Number("I", 5)}, "embedding_length=64 is not a multiple of the 5 heads"),
        ("gemma4", {"patch_size": None}, r"clip\.vision\.patch_size is missing"),
        ("qwen2_5_vl", {"n_wa_pattern": None}, "n_wa_pattern is missing"),
        ("qwen3_vl", {"is_deepstack_layers": Number("I", [1, 0])}, "is not an array of booleans"),
    ],
)
def test_wrong_values_are_refused(family: str, tower: dict[str, Any], says: str, tmp_path: Path) -> None:
    files = write_mmproj_model(tmp_path, family, tower=tower)
    with pytest.raises(UnsupportedModelError, match=says) as caught:
        parse_architecture(read_model_config(files.text, mmproj=files.mmproj))
    assert str(files.mmproj) in str(caught.value)


def test_an_unknown_activation_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "mmproj.gguf", keys_of_released_models("gemma3", **{"clip.use_silu": True}), {})
    file = read_part(path)
    with pytest.raises(UnsupportedModelError, match=r"clip\.use_gelu=True and clip\.use_silu=True"):
        projector_of(file).config(mmproj_fields(file))
