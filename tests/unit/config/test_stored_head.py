"""Whether the head shares the embedding's weights: what the file has counts, not what config.json says."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inflight.config.architecture import TRANSFORMERS, ModelArchitecture
from inflight.config.gguf_config import read_model_config
from inflight.config.overrides import merge_overrides
from inflight.config.parse_architecture import parse_architecture
from inflight.config.safetensors_file import model_name
from inflight.config.stored_head import resolve_head
from tests.support.gguf_models import write_pair
from tests.support.model_zoo import FAMILY_CONFIGS, write_model

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TIED = FAMILY_CONFIGS["qwen3"][1]


def architecture_of(path: Path, **overrides: object) -> ModelArchitecture:
    return parse_architecture(merge_overrides(read_model_config(path), overrides))


def save(folder: Path, tensors: dict[str, Tensor], *, sharded: bool = False) -> Path:
    """`sharded`: the head is in a file of its own."""
    parts = {"model.safetensors": tensors}
    if sharded:
        (folder / "model.safetensors").unlink()
        head = {name: tensor for name, tensor in tensors.items() if "lm_head" in name}
        parts = {"a.safetensors": {name: tensors[name] for name in tensors.keys() - head}, "b.safetensors": head}
    for name, part in parts.items():
        save_file({key: value.contiguous() for key, value in part.items()}, folder / name)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(TIED, tmp_path / "model", seed=1)


def test_a_file_without_a_head_changes_nothing(folder: Path) -> None:
    architecture = architecture_of(folder)
    assert architecture.tie_word_embeddings
    assert resolve_head(architecture, folder) == architecture


@pytest.mark.parametrize("sharded", [False, True])
def test_an_equal_head_is_left_unread(folder: Path, sharded: bool, caplog: pytest.LogCaptureFixture) -> None:
    tensors = load_file(folder / "model.safetensors")
    save(folder, {**tensors, HEAD: tensors[EMBEDDING].clone()}, sharded=sharded)
    architecture = replace(architecture_of(folder), unread=("mtp.",))
    assert resolve_head(architecture, folder) == replace(architecture, unread=("mtp.", HEAD))
    assert not caplog.records


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", ["lm_head.weight", "language_model.lm_head.weight"])
def test_another_head_is_used(folder: Path, sharded: bool, name: str, caplog: pytest.LogCaptureFixture) -> None:
    tensors = load_file(folder / "model.safetensors")
    other = tensors[EMBEDDING].clone()
    other[-1, -1] += 1  # the last number
    save(folder, {**tensors, name: other}, sharded=sharded)
    architecture = architecture_of(folder)
    with caplog.at_level(logging.WARNING):
        assert resolve_head(architecture, folder) == replace(architecture, tie_word_embeddings=False)
    [record] = caplog.records
    assert str(folder) in record.getMessage()


def test_a_head_in_another_form_is_used(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for head in (
        {HEAD: tensors[EMBEDDING].half()},
        {"lm_head.qweight": torch.ones(2), "lm_head.scales": torch.ones(2)},
    ):
        save(folder, {**tensors, **head})
        assert not resolve_head(architecture_of(folder), folder).tie_word_embeddings


def test_a_head_alone_is_the_embedding(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save(folder, {HEAD: tensors.pop(EMBEDDING), **tensors})
    resolved = resolve_head(architecture_of(folder), folder)
    assert resolved.tie_word_embeddings
    assert model_name(HEAD, resolved.renames) == EMBEDDING


def test_an_override_that_ties_does_not_hide_a_stored_head(tmp_path: Path) -> None:
    _, file = write_pair(tmp_path, "qwen3")
    assert not architecture_of(file).tie_word_embeddings
    tied = architecture_of(file, tie_word_embeddings=True)
    assert not resolve_head(tied, file).tie_word_embeddings


def test_files_that_cannot_be_read_are_left_to_the_loader(folder: Path) -> None:
    architecture = architecture_of(folder)
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    assert resolve_head(architecture, folder) == architecture
    (folder / "model.safetensors").unlink()
    assert resolve_head(architecture, folder) == architecture


def test_a_head_is_not_compared_if_it_is_not_tied_or_if_transformers_computes_the_model(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save(folder, {**tensors, HEAD: tensors[EMBEDDING].clone()})
    architecture = architecture_of(folder)
    for other in (replace(architecture, tie_word_embeddings=False), replace(architecture, implementation=TRANSFORMERS)):
        assert resolve_head(other, folder) == other


def test_a_head_with_a_bias_is_not_tied(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save(folder, {**tensors, HEAD: tensors[EMBEDDING].clone(), "lm_head.bias": torch.ones(3)})
    assert not resolve_head(architecture_of(folder), folder).tie_word_embeddings
