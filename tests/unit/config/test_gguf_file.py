"""The GGUF header: what is read, and that a file that lies is one `CheckpointError`, at once and without its memory."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inflight.config.gguf_file import GgufStrings, read_part
from inflight.config.gguf_types import gguf_types
from inflight.errors import CheckpointError
from tests.support.gguf_files import Number, floats, gguf_bytes, quantized

METADATA = {
    "general.architecture": "llama",
    "a.flag": True,
    "a.count": Number("Q", 2**40),
    "a.real": Number("f", 0.5),
    "a.small": Number("b", -3),
    "a.numbers": Number("i", [1, -2, 3]),
    "a.flags": Number("?", [True, False, True]),
    "a.texts": ["x", "", "naïve"],
}
TENSORS = {
    "first.weight": floats(torch.arange(10, dtype=torch.float32)),
    "second.weight": quantized("Q8_0", (3, 64), np.random.default_rng(0)),
    "third.weight": floats(torch.ones(2, 5, dtype=torch.float16)),
}
VALID = gguf_bytes(METADATA, TENSORS)


def write(folder: Path, data: bytes) -> Path:
    path = folder / "x.gguf"
    path.write_bytes(data)
    return path


def refusal(folder: Path, data: bytes) -> str:
    path = write(folder, data)
    with pytest.raises(CheckpointError) as caught:
        read_part(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("version", [2, 3])
def test_what_a_header_says(tmp_path: Path, version: int) -> None:
    file = read_part(write(tmp_path, gguf_bytes(METADATA, TENSORS, version=version)))
    values = dict(file.metadata)
    numbers, flags, texts = (values.pop(f"a.{name}") for name in ("numbers", "flags", "texts"))
    assert values == {
        "general.architecture": "llama", "a.flag": True, "a.count": 2**40, "a.real": 0.5, "a.small": -3,
    }  # fmt: skip
    assert isinstance(numbers, np.ndarray)
    assert numbers.tolist() == [1, -2, 3]
    assert isinstance(flags, np.ndarray)
    assert flags.tolist() == [True, False, True]
    assert isinstance(texts, GgufStrings)
    assert file.read_strings(texts) == ["x", "", "naïve"]
    shapes = {name: (tensor.shape, tensor.type.name) for name, tensor in file.tensors.items()}
    assert shapes == {
        "first.weight": ((10,), "F32"), "second.weight": ((3, 64), "Q8_0"), "third.weight": ((2, 5), "F16"),
    }  # fmt: skip
    for name, stored in TENSORS.items():
        assert file.map_tensor(name).tobytes() == stored.data
    assert file.map_tensor("second.weight", 1, 1).tobytes() == TENSORS["second.weight"].data[68:136]


@pytest.mark.parametrize("alignment", [8, 128, 2**16])
def test_an_alignment_of_its_own(tmp_path: Path, alignment: int) -> None:
    metadata = {"general.alignment": Number("I", alignment)}
    file = read_part(write(tmp_path, gguf_bytes(metadata, TENSORS, alignment=alignment)))
    assert file.map_tensor("third.weight").tobytes() == TENSORS["third.weight"].data


def test_a_tensor_with_four_dimensions(tmp_path: Path) -> None:
    file = read_part(write(tmp_path, gguf_bytes({}, {"x": floats(torch.ones(2, 1, 3, 4))})))
    assert file.tensors["x"].shape == (2, 1, 3, 4)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_part(tmp_path / "none.gguf")


def at(position: int, kind: str, value: int) -> bytes:
    """The valid file with another number there."""
    return VALID[:position] + struct.pack(kind, value) + VALID[position + struct.calcsize(kind) :]


KEY = VALID.index(b"a.flag") - 8  # its length
FLAG = VALID.index(b"a.flag") + len("a.flag")  # the type of its value
NUMBERS = VALID.index(b"a.numbers") + len("a.numbers")  # 9, the elements' type, their count
TEXTS = VALID.index(b"a.texts") + len("a.texts")
FIRST = VALID.index(b"first.weight") + len("first.weight")
TENSOR = VALID.index(b"second.weight") + len("second.weight")  # dimensions, sizes, type, offset


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["0 are left"]),
        (b"GGU", ["3 are left"]),
        (b"GGML" + VALID[4:], ["no GGUF file"]),
        (at(4, "<I", 1), ["version 1", "2 and 3"]),
        (at(4, ">I", 3), ["a big-endian file (version 3)"]),
        (at(8, "<Q", 2**60), ["tensors cannot be"]),
        (at(16, "<Q", 2**64 - 1), ["metadata pairs cannot be"]),
        (at(16, "<Q", 6), ["corrupt"]),
        (at(KEY, "<Q", 2**63), ["are needed"]),
        (at(FLAG, "<I", 99), ["unknown type 99"]),
        (at(FLAG + 4, "<B", 7), ["is 7, neither 0 nor 1"]),
        (at(NUMBERS + 4, "<I", 9), ["array of the unknown type 9"]),
        (at(NUMBERS + 8, "<Q", 2**40), ["numbers cannot be"]),
        (at(TEXTS + 8, "<Q", 2**40), ["strings cannot be"]),
        (at(TEXTS + 16, "<Q", 2**63), ["strings go on"]),
        (VALID.replace(b"a.flag", b"a.real"), ["'a.real' is there twice"]),
        (VALID.replace(b"a.flag", b"a.fl\xff\xff"), ["not UTF-8"]),
        (VALID.replace(b"third.weight", b"first.weight"), ["'first.weight' is there twice"]),
        (at(TENSOR, "<I", 0), ["0 dimensions"]),
        (at(TENSOR, "<I", 5), ["5 dimensions"]),
        (at(TENSOR + 4, "<Q", 0), ["shape [0, 3]"]),
        (at(TENSOR + 4, "<Q", 2**63), ["shape"]),
        (at(TENSOR + 4, "<Q", 33), ["rows of 33", "multiple of 32"]),
        (at(TENSOR + 12, "<Q", 2**40), ["ends at", "the file ends at"]),
        (at(FIRST + 4, "<Q", 20), ["'second.weight' overlaps"]),
        (at(TENSOR + 20, "<I", 26), ["second.weight is stored as I32", "Q8_0", "Q4_K"]),
        (at(TENSOR + 20, "<I", 4711), ["type 4711"]),
        (at(TENSOR + 24, "<Q", 65), ["not aligned to 32"]),
        (at(TENSOR + 24, "<Q", 2**63), ["ends at"]),
        (at(TENSOR + 24, "<Q", 0), ["overlaps"]),
        (at(TENSOR + 24, "<Q", 96), ["'second.weight' begins at byte"]),
        (at(FIRST + 16, "<Q", 64), ["'first.weight' begins at byte"]),
        (at(FIRST + 4, "<Q", 1), ["'second.weight' begins at byte", "what is before it ends at byte"]),
        (VALID[:-1], ["ends at"]),
        (gguf_bytes({"general.alignment": Number("I", 48)}, TENSORS), ["general.alignment=48"]),
        (gguf_bytes({"general.alignment": "32"}, TENSORS), ["general.alignment='32'"]),
        (gguf_bytes({"general.alignment": Number("I", 0)}, {}), ["general.alignment=0"]),
        (gguf_bytes({"general.alignment": Number("I", 4)}, {}), ["general.alignment=4"]),
        (gguf_bytes({"general.alignment": Number("I", 2**17)}, {}), ["general.alignment=131072"]),
    ],
)
def test_a_file_that_lies(tmp_path: Path, data: bytes, words: list[str]) -> None:
    message = refusal(tmp_path, data)
    for word in words:
        assert word in message


def test_every_beginning_of_a_file_is_refused(tmp_path: Path) -> None:
    for length in range(0, len(VALID), 7):
        refusal(tmp_path, VALID[:length])


INTERESTING = [0, 1, 7, 8, 9, 2**8 - 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]


@settings(max_examples=100, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(
        st.tuples(
            st.integers(0, len(VALID) - 8),
            st.one_of(
                st.sampled_from(INTERESTING).map(lambda number: struct.pack("<Q", number)),
                st.binary(min_size=1, max_size=8),
            ),
        ),
        min_size=1,
        max_size=4,
    ),
    stop=st.one_of(st.none(), st.integers(0, len(VALID))),
)
def test_a_mutated_file_is_read_or_refused(tmp_path: Path, changes: list[tuple[int, bytes]], stop: int | None) -> None:
    data = bytearray(VALID)
    for position, change in changes:
        data[position : position + len(change)] = change
    path = write(tmp_path, bytes(data[:stop]))
    gguf_types()  # imports the package, which needs memory of its own
    tracemalloc.start()
    try:
        file = read_part(path)
        for name in file.tensors:
            file.map_tensor(name).sum()
        for value in file.metadata.values():
            if isinstance(value, GgufStrings):
                file.read_strings(value)
    except CheckpointError:
        pass  # the one error there is
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2**20
