"""Models in two GGUF files: which file for images is taken, and what is refused."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from inflight.config.gguf_config import read_model_config
from inflight.config.gguf_file import read_part
from inflight.config.gguf_mmproj import find_mmproj, with_mmproj
from inflight.config.gguf_parts import read_gguf
from inflight.config.parse_architecture import parse_architecture
from inflight.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from tests.support.gguf_files import Number, write_gguf
from tests.support.mmproj_files import Files, write_mmproj_model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_mmproj_model(tmp_path_factory.mktemp("model"), "qwen3_vl")


def test_the_only_file_beside_the_model_is_taken(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert find_mmproj(files.text, None) == files.mmproj
    assert str(files.mmproj) in caplog.text
    assert find_mmproj(files.text, None, language_model_only=True) is None
    assert find_mmproj(files.text, str(files.mmproj)) == files.mmproj
    alone = Path(shutil.copy(files.text, tmp_path / "x.gguf"))
    assert find_mmproj(alone, None) is None
    assert find_mmproj(files.folder, None) is None
    for name in ("mmproj-F16.gguf", "mmproj-F32.gguf"):
        shutil.copy(files.mmproj, tmp_path / name)
    caplog.clear()
    assert find_mmproj(alone, None) is None
    assert "mmproj-F16.gguf, mmproj-F32.gguf" in caplog.text
    assert find_mmproj(alone, str(tmp_path / "mmproj-F16.gguf")) == tmp_path / "mmproj-F16.gguf"


def test_a_file_of_another_model_beside_it_is_left_out(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = write_gguf(tmp_path / "x.gguf", {"general.architecture": "llama"}, {})
    mmproj = Path(shutil.copy(files.mmproj, tmp_path / "mmproj.gguf"))
    assert find_mmproj(text, None) is None
    assert str(text) in caplog.text and str(mmproj) in caplog.text
    mmproj.write_bytes(b"GGUF")
    assert find_mmproj(text, None) is None


def test_a_file_that_cannot_be_is_refused(files: Files, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"absent\.gguf"):
        find_mmproj(files.text, str(tmp_path / "absent.gguf"))
    with pytest.raises(ConfigError, match="is a folder"):
        find_mmproj(files.folder, str(files.mmproj))


def test_the_architecture_is_that_of_the_folder(files: Files) -> None:
    found = parse_architecture(read_model_config(files.text, mmproj=files.mmproj))
    assert found.vision is not None
    assert found.vision == parse_architecture(read_model_config(files.folder)).vision
    alone = parse_architecture(read_model_config(files.text))
    assert alone.vision is None and alone.layers == found.layers


@pytest.mark.parametrize(
    ("tower", "text", "says"),
    [
        ({"projection_dim": Number("I", 128)}, {}, "its embeddings have 128 numbers, and those of the model 256"),
        ({"is_deepstack_layers": None}, {}, "it has features for 0 layers of the model, which takes them in 2"),
        ({}, {"tokenizer.ggml.tokens": ["a", "<|vision_start|>"]}, r"lacks <\|image_pad\|>, <\|vision_end\|>"),
        ({}, {"tokenizer.ggml.tokens": None}, r"lacks <\|image_pad\|>"),
        ({}, {"general.architecture": "qwen3"}, "it is made for qwen3vl, .*, and the model is 'qwen3'"),
    ],
)
def test_two_files_that_do_not_fit(tower: dict[str, Any], text: dict[str, Any], says: str, tmp_path: Path) -> None:
    """The error has the names of both."""
    given = {**text, **({"qwen3.embedding_length": Number("I", 256)} if "general.architecture" in text else {})}
    files = write_mmproj_model(tmp_path, "qwen3_vl", tower=tower, text=given)
    with pytest.raises(UnsupportedModelError, match=says) as caught:
        with_mmproj({}, read_gguf(files.text), read_part(files.mmproj))
    assert str(files.text) in str(caught.value) and str(files.mmproj) in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"general.type": "adapter", "general.architecture": "clip"}, "is no mmproj file"),
        ({"general.architecture": "llama"}, "is no mmproj file"),
        ({"clip.has_vision_encoder": False}, "no part that reads images"),
        (
            {"clip.projector_type": "ldpv2"},
            r"clip\.projector_type='ldpv2' is not supported; supported are idefics3, gemma3",
        ),
        ({"clip.vision.feature_layer": Number("i", [3])}, r"feature_layer=\[3\] is not supported"),
    ],
)
def test_other_kinds_are_refused(metadata: dict[str, Any], says: str, files: Files, tmp_path: Path) -> None:
    base = {"general.architecture": "clip", "clip.has_vision_encoder": True, "clip.projector_type": "gemma3"}
    path = write_gguf(tmp_path / "mmproj.gguf", {**base, **metadata}, {})
    with pytest.raises(UnsupportedModelError, match=says):
        read_model_config(files.text, mmproj=path)
