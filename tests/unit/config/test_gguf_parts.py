"""Models that are split over several GGUF files: all parts are one model, and a missing or foreign part is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inflight.config.gguf_config import gguf_config
from inflight.config.gguf_parts import read_gguf
from inflight.config.weight_room import find_room
from inflight.errors import CheckpointError
from tests.support.gguf_files import Number, Stored, floats, quantized, write_gguf, write_parts
from tests.support.gguf_models import CONFIGS, metadata_of

RANDOM = np.random.default_rng(0)
METADATA = metadata_of("qwen3", CONFIGS["qwen3"])
TENSORS: dict[str, Stored] = {
    "token_embd.weight": floats(torch.arange(64.0).view(4, 16)),
    "blk.0.ffn_up.weight": quantized("Q8_0", (6, 64), RANDOM),
    "blk.0.ffn_down.weight": quantized("Q4_0", (2, 32), RANDOM),
    "output_norm.weight": floats(torch.ones(5)),
}


def keys(number: int, count: int, tensors: int) -> dict[str, Any]:
    return {
        "split.no": Number("H", number),
        "split.count": Number("H", count),
        "split.tensors.count": Number("i", tensors),
    }


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_parts_are_one_model(tmp_path: Path, count: int) -> None:
    whole = read_gguf(write_gguf(tmp_path / "whole.gguf", METADATA, TENSORS))
    paths = write_parts(tmp_path, METADATA, TENSORS, count)
    file = read_gguf(paths[0])
    assert {name: (tensor.shape, tensor.type) for name, tensor in file.tensors.items()} == {
        name: (tensor.shape, tensor.type) for name, tensor in whole.tensors.items()
    }
    for name, stored in TENSORS.items():
        assert file.map_tensor(name).tobytes() == stored.data
    assert gguf_config(file) == gguf_config(whole)
    held = [path for path in paths if any(tensor.path == path for tensor in file.tensors.values())]
    assert file.paths == sorted({paths[0], *held})
    unused: Any = None  # the architecture is not read
    assert find_room(paths[0], unused, "auto", None) == find_room(whole.path, unused, "auto", None)


def _remove(paths: list[Path]) -> None:
    paths[1].unlink()


def _exchange(paths: list[Path]) -> None:
    paths[2].write_bytes(paths[1].read_bytes())


def _from_another_model(paths: list[Path]) -> None:
    write_gguf(paths[1], keys(1, 3, 9), {"blk.0.ffn_up.weight": TENSORS["blk.0.ffn_up.weight"]})


def _whole_model(paths: list[Path]) -> None:
    write_gguf(paths[1], METADATA, TENSORS)


def _with_the_tensors_of_the_first(paths: list[Path]) -> None:
    write_gguf(paths[1], keys(1, 3, 4), {"token_embd.weight": TENSORS["token_embd.weight"]})


def _with_fewer_tensors(paths: list[Path]) -> None:
    write_gguf(paths[1], keys(1, 3, 4), {})


def _with_lists_for_numbers(paths: list[Path]) -> None:
    write_gguf(paths[1], {**keys(1, 3, 4), "split.no": Number("H", [1, 1])}, {})


def _truncate(paths: list[Path]) -> None:
    paths[1].write_bytes(paths[1].read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_remove, ["is the first of 3 parts", "-00002-of-00003.gguf is missing"]),
        (_exchange, ["-00003-of-00003.gguf is not part 3 of the model", "split.no=1", "split.no=2"]),
        (_from_another_model, ["-00002-of-00003.gguf is not part 2", "split.tensors.count=9", "split.tensors.count=4"]),
        (_whole_model, ["-00002-of-00003.gguf is not part 2", "split.no=None"]),
        (_with_the_tensors_of_the_first, ["token_embd.weight is both in", "-00002-of-00003.gguf", "another model"]),
        (_with_fewer_tensors, ["should have 4 tensors, but have 3"]),
        (_with_lists_for_numbers, ["-00002-of-00003.gguf is not part 2"]),
        (_truncate, ["-00002-of-00003.gguf: truncated or corrupt"]),
    ],
)
def test_a_missing_or_foreign_part_is_named(
    tmp_path: Path, damage: Callable[[list[Path]], None], words: list[str]
) -> None:
    paths = write_parts(tmp_path, METADATA, TENSORS, 3)
    damage(paths)
    with pytest.raises(CheckpointError) as caught:
        read_gguf(paths[0])
    for word in words:
        assert word in str(caught.value)


def test_only_the_first_part_is_a_model(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, METADATA, TENSORS, 3)
    with pytest.raises(CheckpointError, match=r"part 2 of 3 .*-00001-of-00003\.gguf"):
        read_gguf(paths[1])
    paths[1].rename(tmp_path / "other")
    paths[0].rename(paths[1])
    (tmp_path / "other").rename(paths[0])
    with pytest.raises(CheckpointError, match=r"00001-of-00003\.gguf is part 2 of 3 .*name back"):
        read_gguf(paths[0])
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf is part 1 of 3 .*name back"):
        read_gguf(paths[1])
    paths[0].unlink()
    with pytest.raises(CheckpointError, match=r"part 3 of 3 .*download the missing files .*-00001-of-00003\.gguf"):
        read_gguf(paths[2])
    paths = write_parts(tmp_path, METADATA, TENSORS, 3)
    other_name = paths[0].rename(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"part 1 of 3 .*name back"):
        read_gguf(other_name)


def test_a_count_that_is_no_count(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"split\.count='3' is no number"):
        read_gguf(write_gguf(tmp_path / "x.gguf", {"split.count": "3"}, {}))
