"""Which names mean which models, and which are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inflight.entrypoints.router.catalog import Catalog, NameOutsideError
from inflight.entrypoints.router.presets import Preset
from inflight.errors import ConfigError, ModelNotFoundError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in (
        "plain/config.json",
        "org/name/config.json",
        "single.gguf",
        "mmproj-single.gguf",
        "split-00001-of-00002.gguf",
        "split-00002-of-00002.gguf",
        "with-images/model.gguf",
        "with-images/mmproj-F16.gguf",
        "two/a.gguf",
        "two/b.gguf",
        ".hidden/config.json",
        "notes.txt",
        "empty/readme.md",
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("{}")
    return tmp_path


def test_each_kind_of_model_in_a_folder(folder: Path) -> None:
    found = Catalog(folder, {}, has_cache=False).models()
    assert {name: Path(each.model).relative_to(folder).as_posix() for name, each in found.items()} == {
        "org/name": "org/name",
        "plain": "plain",
        "single": "single.gguf",
        "split": "split-00001-of-00002.gguf",
        "two/a": "two/a.gguf",
        "two/b": "two/b.gguf",
        "with-images": "with-images/model.gguf",
    }
    assert found["split"].num_bytes == 4
    assert found["single"].names == ("single", "single.gguf", "single:latest")


def test_names_that_no_request_can_have(folder: Path) -> None:
    before = Catalog(folder, {}, has_cache=False).models()
    for name in (b"\xff.gguf", b"a\nb.gguf", b"\xffx/config.json", b"two/\xfe.gguf", b"org/\x1b[31m/config.json"):
        path = os.path.join(os.fsencode(folder), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(os.fsdecode(path)).write_text("{}")
    found = Catalog(folder, {}, has_cache=False).models()
    assert found.keys() == before.keys() and all(each.digest for each in found.values())


def test_links_that_lead_nowhere(folder: Path) -> None:
    before = Catalog(folder, {}, has_cache=False).models()
    for name, target in (("loop", "loop"), ("loop.gguf", "loop.gguf"), ("gone.gguf", "nowhere"), ("up", "..")):
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "fifo.gguf")
    found = Catalog(folder, {}, has_cache=False).models()
    assert before.keys() <= found.keys() and not found.keys() & {"loop", "gone", "fifo"}


def test_names(folder: Path) -> None:
    catalog = Catalog(folder, {}, has_cache=False)
    for name in ("single", "single.gguf", "single:latest"):
        assert catalog.find(name).name == "single"
    for name in ("../plain", "/etc", "~/x", "a/../../b", "..", "a\0b", "..\\x", str(folder / "plain")):
        with pytest.raises(NameOutsideError, match="is a path"):
            catalog.find(name)
    with pytest.raises(ModelNotFoundError, match="did you mean 'plain'"):
        catalog.find("plane")
    (folder / "new").mkdir()
    (folder / "new" / "config.json").write_text("{}")
    assert catalog.find("new").name == "new"


def test_a_section_goes_before_the_folder(folder: Path) -> None:
    presets = {
        "*": Preset(engine={"max_model_len": 64}, is_pinned=True),
        "plain": Preset(is_pinned=True),
        "other": Preset(model=str(folder / "single.gguf")),
        "org/on-the-hub": Preset(),
    }
    found = Catalog(folder, presets, has_cache=False).models()
    assert found["plain"].preset.is_pinned and found["plain"].model == str(folder / "plain")
    assert found["other"].model == str(folder / "single.gguf") and found["other"].num_bytes == 2
    assert found["org/on-the-hub"].model == "org/on-the-hub"
    assert found["single"].preset == Preset(engine={"max_model_len": 64})
    assert "*" not in found


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        Catalog(tmp_path / "absent", {}, has_cache=False)
