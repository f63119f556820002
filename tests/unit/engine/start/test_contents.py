"""`contents_of`: what changes the digest that names KV blocks in tiers, and what does not."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inflight.config.architecture import TRANSFORMERS
from inflight.config.engine import ModelConfig
from inflight.engine.start import contents
from inflight.engine.start.contents import contents_of
from tests.conformance.configs import engine_config
from tests.support.gguf_files import floats, write_gguf, write_parts


def write_safetensors(file: Path, *values: float) -> None:
    data = np.array(values, dtype=np.float32).tobytes()
    header = json.dumps({"w": {"dtype": "F32", "shape": [len(values)], "data_offsets": [0, len(data)]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


def model(folder: Path, **fields: Any) -> ModelConfig:
    return replace(engine_config().model, folder=folder, load_format="auto", fingerprint="m", **fields)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "one").mkdir()
    write_safetensors(tmp_path / "one" / "model.safetensors", 1.0, 2.0)
    return tmp_path / "one"


def test_equal_weights_in_another_folder_are_the_same_model(folder: Path) -> None:
    other = folder.parent / "other"
    other.mkdir()
    write_safetensors(other / "model.safetensors", 1.0, 2.0)
    (other / "README.md").write_text("no weights")
    digest = contents_of(model(folder))
    assert contents_of(model(other)) == digest
    assert len(digest) == 32


def test_each_byte_of_the_weights_counts(folder: Path) -> None:
    before = contents_of(model(folder))
    file = folder / "model.safetensors"
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    file.write_bytes(changed)
    assert contents_of(model(folder)) != before


def test_each_file_of_the_weights_counts(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = set()
    for second in (2.0, 3.0):
        for name, value in zip(names, (1.0, second), strict=True):
            write_safetensors(folder / name, value)
        found.add(contents_of(model(folder)))
    assert len(found) == 2


def test_each_part_of_a_gguf_file_counts(tmp_path: Path) -> None:
    found = set()
    for second in (2.0, 3.0):
        tensors = {"a": floats(torch.ones(2)), "b": floats(torch.full((2,), second))}
        for first in (write_gguf(tmp_path / "a.gguf", {}, tensors), write_parts(tmp_path, {}, tensors, 2)[0]):
            found.add(contents_of(model(first)))
    assert len(found) == 4


def test_numerics_and_version_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents_of(model(folder))
    assert contents_of(replace(model(folder), fingerprint="another dtype")) != before
    monkeypatch.setattr(contents, "__version__", "0.0.0")
    assert contents_of(model(folder)) != before


def test_random_weights_are_not_read(tmp_path: Path) -> None:
    """Their seed is in the fingerprint."""
    dummy = replace(model(tmp_path / "nothing"), load_format="dummy")
    assert contents_of(dummy) == contents_of(dummy)
    assert contents_of(replace(dummy, fingerprint="another seed")) != contents_of(dummy)


def test_the_code_of_transformers_counts_only_for_models_that_it_computes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = model(folder)
    foreign = replace(native, architecture=replace(native.architecture, implementation=TRANSFORMERS))
    found = {(contents_of(native), contents_of(foreign))}
    for content in ("a = 1", "a = 2"):
        (folder / "modeling.py").write_text(content)
        found.add((contents_of(native), contents_of(foreign)))
    monkeypatch.setattr(metadata, "version", lambda name: f"0.0.0 of {name}")
    found.add((contents_of(native), contents_of(foreign)))
    assert len({digest for digest, _ in found}) == 1
    assert len({digest for _, digest in found}) == 4
