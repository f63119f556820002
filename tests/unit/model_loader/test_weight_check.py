"""Names, shapes and dtypes of a checkpoint against those of a model, both played."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.errors import CheckpointError
from inflight.layers.weights import WeightSlot
from inflight.model_loader.weight_check import check_weights, list_names
from inflight.model_loader.weight_source import StoredTensor

FILE = Path("/m/model.safetensors")
NEEDED: dict[str, tuple[int, ...]] = {f"m.{name}.weight": (2, 3) for name in ("a", "b")}


class Played:
    """A model that needs these tensors, and leaves those whose name begins with "unread" unread."""

    tower = None

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def load_units(self) -> Iterator[tuple[str, Any]]:
        yield "m", self

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, WeightSlot]]:
        assert prefix == "m"
        for name, shape in self.shapes.items():
            yield name, WeightSlot(shape=shape, destination=torch.empty(shape))

    def leaves_unread(self, name: str) -> bool:
        return name.startswith("unread")


class Source:
    def __init__(self, tensors: dict[str, StoredTensor], unlisted: set[str]) -> None:
        self.tensors, self.unlisted = tensors, unlisted
        self.name_in_file: Callable[[str], str] = str


def stored(shape: tuple[int, ...] = (2, 3), dtype: str = "BF16", *, is_quantized: bool = False) -> StoredTensor:
    return StoredTensor(FILE, "", shape, dtype, is_quantized)


def checked(
    more: dict[str, StoredTensor] | None = None, unlisted: set[str] | None = None, *, without: str = ""
) -> list[str]:
    """Of a checkpoint that is right, but for `more` and the tensor `without`."""
    tensors = {name: stored(shape) for name, shape in NEEDED.items() if name != without} | (more or {})
    named = {name: replace(tensor, stored_name=tensor.stored_name or name) for name, tensor in tensors.items()}
    source: Any = Source(named, unlisted or set())
    model: Any = Played(NEEDED)
    return check_weights(source, model)


def test_what_fits() -> None:
    assert checked() == []
    for dtype in ("BF16", "F16", "F32", "F64"):
        assert checked({"m.a.weight": stored(dtype=dtype)}) == []
    assert checked({"m.a.weight": stored(dtype="gptq", is_quantized=True)}) == []


@pytest.mark.parametrize("name", ["inv_freq", "cos_cached", "sin_cached"])
def test_tables_of_old_releases_are_left_out(name: str) -> None:
    assert checked({f"m.rotary_emb.{name}": stored()}) == []
    with pytest.raises(CheckpointError, match="does not account for"):
        checked({f"m.rotary_emb.{name}.weight": stored()})


def test_what_the_model_leaves_unread_and_what_no_index_lists() -> None:
    assert checked({"unread.x": stored()}) == []
    assert checked({"x": stored(), "unread.y": stored()}, {"x", "unread.y", "m.a.weight"}) == ["x"]
    with pytest.raises(CheckpointError, match=r"does not account for: y \(in /m/model.safetensors\); leaving"):
        checked({"x": stored(), "y": stored()}, {"x"})


def test_a_tensor_that_is_missing() -> None:
    with pytest.raises(CheckpointError, match=r"^the checkpoint lacks m\.b\.weight$"):
        checked(without="m.b.weight")


@pytest.mark.parametrize("suffix", ["qweight", "weight_packed", "weight_scale", "weight_scale_inv", "weight.absmax"])
def test_a_checkpoint_that_seems_to_be_quantized(suffix: str) -> None:
    for without, words in (("m.b.weight", "lacks"), ("", "does not account for")):
        with pytest.raises(CheckpointError, match=rf"{words}.*\(m\.b\.{suffix}\)"):
            checked({f"m.b.{suffix}": stored()}, without=without)
    with pytest.raises(CheckpointError) as caught:
        checked({f"m.b{suffix}": stored()})
    assert "seems to be quantized" not in str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (stored((3, 2)), r"m\.a\.weight in /m/model.safetensors has shape \[3, 2\], but config.json asks for \[2, 3\]"),
        (stored((3, 2), "gptq", is_quantized=True), r"has shape \[3, 2\]"),
        (stored(dtype="I8"), "m.a.weight in /m/model.safetensors is stored as I8; only BF16, F16, F32, F64 are"),
        (stored(dtype="F8_E4M3"), "is stored as F8_E4M3"),
    ],
)
def test_a_tensor_in_another_form(tensor: StoredTensor, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        checked({"m.a.weight": tensor})


def test_long_lists_are_cut() -> None:
    names = [str(number) for number in range(10)]
    assert list_names(names[:1]) == "0"
    assert list_names(names[:8]) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert list_names(names[:9]) == "0, 1, 2, 3, 4, 5, 6, 7 and 1 more"
