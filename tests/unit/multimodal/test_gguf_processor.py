"""The processor of a model in GGUF files answers as that of the same model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inflight.errors import ConfigError
from inflight.multimodal.family_processor import FamilyProcessor
from inflight.multimodal.gguf_processor import as_folder
from inflight.multimodal.messages import Start, read_start, start_frame
from tests.support.gguf_files import Number
from tests.support.image_models import drawing
from tests.support.mmproj_files import MODELS, Files, write_mmproj_model

SIZES = [(40, 30), (20, 50), (8, 8)]


def start_of(files: Files) -> Start:
    return read_start(start_frame(Start(folder=files.text, tokenizer=files.text, mmproj=files.mmproj)))


def processor_of(start: Start) -> FamilyProcessor:
    with as_folder(start) as given:
        return FamilyProcessor(given)


@pytest.mark.parametrize("family", [family for family in MODELS if family != "qwen3_vl_moe"])
def test_images_are_processed_as_by_the_folder(family: str, tmp_path: Path) -> None:
    files = write_mmproj_model(tmp_path, family)
    ours = processor_of(start_of(files))
    theirs = processor_of(Start(folder=files.folder, tokenizer=files.folder))
    for number, size in enumerate(SIZES):
        found, expected = (each.process(drawing(*size, number), {}) for each in (ours, theirs))
        assert (found.placeholder, found.expansion) == (expected.placeholder, expected.expansion)
        assert [each.grid for each in found.inputs] == [each.grid for each in expected.inputs]
        assert [each.num_tokens for each in found.inputs] == [each.num_tokens for each in expected.inputs]
        pairs = zip(found.inputs, expected.inputs, strict=True)
        assert all(np.array_equal(each.pixels, other.pixels) for each, other in pairs)


def test_a_folder_of_the_tokenizer_is_used(tmp_path: Path) -> None:
    """The GGUF file has no vocabulary that can be used."""
    files = write_mmproj_model(tmp_path, "qwen3_vl", text={"tokenizer.ggml.model": "unknown"})
    start = Start(folder=files.text, tokenizer=files.folder, mmproj=files.mmproj)
    assert len(processor_of(start).process(drawing(16, 16), {}).inputs) == 1
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.model"):
        processor_of(start_of(files))


@pytest.mark.parametrize(
    ("family", "tower", "says"),
    [
        ("smolvlm", {"image_mean": Number("f", [0.5])}, "image_mean=.* for each of three colours"),
        ("smolvlm", {"image_std": None}, "image_std"),
        ("qwen3_vl", {"image_min_pixels": Number("I", 9999)}, "image_min_pixels=9999 is more than"),
    ],
)
def test_wrong_settings_are_refused(family: str, tower: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        processor_of(start_of(write_mmproj_model(tmp_path, family, tower=tower)))
    assert "mmproj-model.gguf" in str(caught.value)
