"""A model of a named shape is written once and whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.shared import models
from benchmarks.shared.models import SHAPES, Shape, model_folder, weight_bytes


def test_a_shape_is_written_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(shape: Shape, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(shape.fields))

    def fail(shape: Shape, folder: Path) -> None:
        write(shape, folder)
        raise OSError("disk full")

    monkeypatch.setattr(models, "write_model", fail)
    with pytest.raises(OSError, match="disk full"):
        model_folder("llama-tiny", tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(models, "write_model", write)
    folder = model_folder("llama-tiny", tmp_path)
    assert json.loads((folder / "config.json").read_text()) == SHAPES["llama-tiny"].fields
    monkeypatch.setattr(models, "write_model", fail)
    assert model_folder("llama-tiny", tmp_path) == folder == model_folder(str(folder), tmp_path)
    with pytest.raises(SystemExit):
        model_folder("no-such-model", tmp_path)


@pytest.mark.full
def test_a_model_is_written(tmp_path: Path) -> None:
    folder = model_folder("llama-tiny", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert {name: config[name] for name in SHAPES["llama-tiny"].fields} == SHAPES["llama-tiny"].fields
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert weight_bytes(folder) == pytest.approx(2 * 4 * (256 * 256 * 3 + 256 * 768 * 3) + 2 * 2 * 4096 * 256, rel=0.01)
    assert (folder / "tokenizer.json").is_file()
