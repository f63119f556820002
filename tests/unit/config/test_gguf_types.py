"""The types of GGUF tensors: those of the package, which is imported only when a GGUF file is opened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inflight.config.gguf_file import read_part
from inflight.config.gguf_types import GgufType, gguf_types, type_name
from inflight.errors import ConfigError
from tests.support.gguf_files import QUANTIZED, floats, write_gguf


def test_sizes_are_those_of_files() -> None:
    """The files that the tests write by hand, after the format's description."""
    types = gguf_types()
    assert types[0] == GgufType("F32", 1, 4)
    for name, (number, block_size, _) in QUANTIZED.items():
        assert (types[number].name, types[number].block_size) == (name, block_size)


def test_names_of_types_that_are_not_read() -> None:
    assert (type_name(26), type_name(4711)) == ("I32", "type 4711")


def test_without_the_package_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "x.gguf", {}, {"x": floats(torch.ones(2))})
    monkeypatch.setitem(sys.modules, "gguf", None)
    gguf_types.cache_clear()
    with pytest.raises(ConfigError, match=r"^GGUF files need the package 'gguf': pip install 'gguf'$"):
        read_part(path)
    monkeypatch.undo()
    assert read_part(path).tensors["x"].shape == (2,)


def test_nothing_else_imports_the_package() -> None:
    """Neither the loader nor a server needs it before a GGUF file is opened."""
    program = (
        "import sys; import inflight.entrypoints.llm, inflight.model_loader.loader; sys.exit('gguf' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
