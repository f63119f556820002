"""Headers of safetensors, read without torch."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inflight.config.safetensors_file import digests, find_files, have_same_bytes, model_name, read_header
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


def write(file: Path, header: str, data: bytes = bytes(8)) -> Path:
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data)
    return file


@pytest.mark.parametrize(
    "entry",
    [
        '"shape": [2], "data_offsets": [0, 9]',
        '"shape": [2], "data_offsets": [0, 1000000000000000000]',
        '"shape": [2], "data_offsets": [8, 0]',
        '"shape": [2], "data_offsets": [-8, 0]',
        '"shape": [2], "data_offsets": [0.0, 8.0]',
        '"shape": [2], "data_offsets": [0, true]',
        '"shape": [2], "data_offsets": [0, 4, 8]',
        '"shape": [2], "data_offsets": 8',
        '"shape": [-2], "data_offsets": [0, 8]',
        '"shape": [2.0], "data_offsets": [0, 8]',
        '"shape": 2, "data_offsets": [0, 8]',
        '"shape": [2]',
        '"shape": [1], "data_offsets": [0, 4]',
        '"shape": [1], "data_offsets": [4, 8]',
        '"shape": [3], "data_offsets": [0, 8]',
        '"shape": [0], "data_offsets": [0, 8]',
        '"shape": [1], "data_offsets": [0, 4]}, "b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]',
    ],
)
def test_a_tensor_that_is_not_in_the_file(tmp_path: Path, entry: str) -> None:
    """A comparison of two such tensors would never end. What the library for safetensors refuses is refused here, too."""
    file = write(tmp_path / "x", f'{{"a": {{"dtype": "F32", {entry}}}}}')
    with pytest.raises(CheckpointError, match=f"^{file} cannot be read as safetensors [(].*; download it again$"):
        read_header(file)


def test_a_header_that_is_nested_too_deeply_and_an_index_too(tmp_path: Path) -> None:
    deep = "[" * 200_000 + "]" * 200_000
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        read_header(write(tmp_path / "x", f'{{"a": {deep}}}'))
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {deep}}}')
    with pytest.raises(CheckpointError, match="is no index"):
        find_files(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    with pytest.raises(CheckpointError, match="it is not a file"):
        read_header(tmp_path / "x")


def test_a_file_that_has_become_shorter_differs(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4), "b": torch.zeros(4)}, tmp_path / "x")
    header = read_header(tmp_path / "x")
    os.truncate(tmp_path / "x", header["a"].start)
    assert not have_same_bytes(header["a"], header["b"])


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
        ("model.text_model.layers.0.a", "model.layers.0.a"),
        ("vision_tower.layers.0.a", "model.vision_tower.layers.0.a"),
        ("visual.blocks.0.a", "model.visual.blocks.0.a"),
        ("model.visual.blocks.0.a", "model.visual.blocks.0.a"),
    ],
)
def test_names(stored: str, name: str) -> None:
    assert model_name(stored, ()) == name
    assert model_name(stored, ((".a", ".b"),)) == name.replace(".a", ".b")


def write_index(folder: Path, content: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(content if isinstance(content, str) else json.dumps(content))


def test_which_files_have_the_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        find_files(tmp_path)
    (tmp_path / "x.safetensors").mkdir()
    for name in ("b.safetensors", "a.safetensors", "other.bin"):
        (tmp_path / name).write_bytes(name.encode())
    assert find_files(tmp_path) == ([tmp_path / "a.safetensors", tmp_path / "b.safetensors"], {})
    weight_map = {"w": "b.safetensors", "v": "c.safetensors", "u": "b.safetensors"}
    write_index(tmp_path, {"weight_map": weight_map})
    assert find_files(tmp_path) == ([tmp_path / "b.safetensors", tmp_path / "c.safetensors"], weight_map)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert find_files(tmp_path) == ([tmp_path / "model.safetensors"], {})


@pytest.mark.parametrize("content", ["{", [], {"weights": {}}, {"weight_map": ["a"]}])
def test_an_index_that_is_none(tmp_path: Path, content: Any) -> None:
    write_index(tmp_path, content)
    with pytest.raises(CheckpointError, match="is no index of safetensors files"):
        find_files(tmp_path)


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/a.safetensors", "sub/a.safetensors"])
def test_an_index_names_only_files_of_its_folder(tmp_path: Path, name: str) -> None:
    write_index(tmp_path, {"weight_map": {"v": "b.safetensors", "w": name}})
    with pytest.raises(CheckpointError, match=f"w is in '{name}'"):
        find_files(tmp_path)


def test_digests_of_files(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("b", "a")]
    for file in files:
        file.write_bytes(file.name.encode() * 1000)
    expected = {f"SHA-256 of {name}": hashlib.sha256(name.encode() * 1000).hexdigest() for name in ("b", "a")}
    assert digests(files) == expected


def test_headers_as_large_as_the_format_allows(tmp_path: Path) -> None:
    for size in (100_000_001, 100_000_000):
        (tmp_path / "x").write_bytes(size.to_bytes(8, "little"))
        with pytest.raises(CheckpointError, match=f"would have {size} bytes, and the file has 8"):
            read_header(tmp_path / "x")
    with (tmp_path / "x").open("r+b") as file:
        file.truncate(100_000_008)  # sparse
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        read_header(tmp_path / "x")
    assert "would have" not in str(caught.value)


def test_tensors_of_another_dtype_or_of_a_file_that_is_gone(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4), "b": torch.zeros(4, dtype=torch.int32)}, tmp_path / "x")
    save_file({"a": torch.zeros(4)}, tmp_path / "y")
    one, other = read_header(tmp_path / "x"), read_header(tmp_path / "y")
    assert not have_same_bytes(one["a"], one["b"])
    assert have_same_bytes(one["a"], other["a"]) and have_same_bytes(other["a"], one["a"])
    (tmp_path / "y").unlink()
    with pytest.raises(CheckpointError, match=r"x or .*y cannot be read"):
        have_same_bytes(one["a"], other["a"])
