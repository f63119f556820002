"""Headers of safetensors, read without torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from inflight.config.safetensors_file import have_same_bytes, model_name, read_header
from inflight.errors import CheckpointError


def test_the_header_says_where_the_bytes_are(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "x", metadata={"format": "pt"})
    header = read_header(tmp_path / "x")
    assert header.keys() == tensors.keys()
    assert (header["a"].dtype, header["a"].shape, header["b"].dtype) == ("F32", (2, 3), "BF16")
    stored = (tmp_path / "x").read_bytes()[header["a"].start : header["a"].stop]
    assert stored == tensors["a"].numpy().tobytes()


@pytest.mark.parametrize("content", [b"", b"\x02\0\0\0\0\0\0\0[]", b"\xff" * 16, b"\x0a\0\0\0\0\0\0\0" + b'{"a": {}} '])
def test_a_file_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        read_header(tmp_path / "x")


def test_bytes_are_compared_to_the_last(tmp_path: Path) -> None:
    large = torch.zeros(2**21, dtype=torch.float32)
    other = large.clone()
    other[-1] = 1
    save_file({"a": large, "b": large.clone(), "c": other, "d": large.view(2, -1).clone()}, tmp_path / "x")
    header = read_header(tmp_path / "x")
    assert have_same_bytes(header["a"], header["b"])
    assert not have_same_bytes(header["a"], header["c"])
    assert not have_same_bytes(header["a"], header["d"])


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.a", "model.layers.0.a"),
        ("language_model.model.layers.0.a", "model.layers.0.a"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("layers.0.a", "model.layers.0.a"),
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("norm.weight", "model.norm.weight"),
        ("language_model.layers.0.a", "model.layers.0.a"),
        ("lm_head.weight", "lm_head.weight"),
        ("vision_tower.layers.0.a", "vision_tower.layers.0.a"),
    ],
)
def test_names(stored: str, name: str) -> None:
    assert model_name(stored, ()) == name
    assert model_name(stored, ((".a", ".b"),)) == name.replace(".a", ".b")
