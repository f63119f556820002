"""Models in the cache of the hub library: which there are, what a removal leaves, and files that the disk has damaged."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from inflight.errors import CheckpointError, ModelNotFoundError
from inflight.hub import resolve_model_folder
from inflight.hub_cache import cached_models, check_files, remove_model, size_text

COMMITS = ("a" * 40, "b" * 40)


def blob_name(contents: bytes, *, is_large: bool) -> str:
    if is_large:
        return hashlib.sha256(contents).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(contents) + contents).hexdigest()


def download(
    cache: Path, repo_id: str, files: dict[str, bytes], *, commit: str = COMMITS[0], ref: str = "main"
) -> None:
    """Put files into the cache as the hub library does."""
    repository = cache / f"models--{repo_id.replace('/', '--')}"
    for name, contents in files.items():
        blob = repository / "blobs" / blob_name(contents, is_large=name.endswith((".gguf", ".safetensors")))
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(contents)
        link = repository / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / ref).write_text(commit)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An offline hub. Its library reads its variables when it is imported, so they are set there."""
    import huggingface_hub.constants
    import huggingface_hub.utils._cache_manager as manager

    folder = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(manager, "HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def full_cache(cache: Path) -> Path:
    download(cache, "org/small", {"config.json": b"{}", "model.safetensors": b"1" * 100, "tokenizer.json": b"{} "})
    download(
        cache,
        "org/quants",
        {
            "m-Q4_K_M.gguf": b"4" * 40,
            "m-Q8_0.gguf": b"8" * 80,
            "mmproj-F16.gguf": b"images",
            "big-00001-of-00002.gguf": b"first",
            "big-00002-of-00002.gguf": b"second",
        },
    )
    download(cache, "org/tokenizer", {"tokenizer.json": b"{}"})
    return cache


def names() -> list[str]:
    return [model.name for model in cached_models()]


def test_nothing_was_downloaded_yet(cache: Path) -> None:
    assert cached_models() == []


def test_the_models_of_a_cache(full_cache: Path) -> None:
    found = {model.name: model for model in cached_models()}
    assert list(found) == [
        "org/quants:big-00001-of-00002.gguf",
        "org/quants:m-Q4_K_M.gguf",
        "org/quants:m-Q8_0.gguf",
        "org/small",
    ]
    assert found["org/small"].num_bytes == 105 and found["org/quants:m-Q8_0.gguf"].num_bytes == 80
    assert found["org/quants:big-00001-of-00002.gguf"].num_bytes == 11
    assert all(model.is_whole and model.modified > 1e9 for model in found.values())


def test_an_interrupted_download_is_told(full_cache: Path) -> None:
    (full_cache / "models--org--small" / "blobs" / "abc.incomplete").write_bytes(b"1")
    (full_cache / "models--org--quants" / "snapshots" / COMMITS[0] / "big-00002-of-00002.gguf").unlink()
    assert [model.name for model in cached_models() if not model.is_whole] == [
        "org/quants:big-00001-of-00002.gguf",
        "org/small",
    ]


def test_what_a_removal_leaves(full_cache: Path) -> None:
    assert remove_model("org/quants:m-Q8_0.gguf") == 80
    assert remove_model("org/quants:big-00001-of-00002.gguf") == 11
    assert remove_model("org/small") == 105
    assert names() == ["org/quants:m-Q4_K_M.gguf"]
    assert resolve_model_folder("org/quants:m-Q4_K_M.gguf").read_bytes() == b"4" * 40
    blobs = [path.read_bytes() for path in (full_cache / "models--org--quants" / "blobs").iterdir()]
    assert sorted(blobs) == [b"4" * 40, b"images"]


def test_a_blob_that_another_revision_uses_stays(cache: Path) -> None:
    download(cache, "org/q", {"m.gguf": b"same"})
    download(cache, "org/q", {"other.gguf": b"same"}, commit=COMMITS[1], ref="v1")
    assert remove_model("org/q:m.gguf") == 0
    assert remove_model("org/q:other.gguf") == 4
    assert list((cache / "models--org--q" / "blobs").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("org/smal", "the hub's cache has no model 'org/smal'; did you mean 'org/small'?"),
        ("org/small:m.gguf", "no GGUF file 'org/small:m.gguf'; it has org/small without GGUF files"),
        ("org/quants:m-Q2_K.gguf", "it has org/quants:big-00001-of-00002.gguf, org/quants:m-Q4_K_M.gguf"),
        ("org/quants:../../../notes.gguf", "no GGUF file 'org/quants:../../../notes.gguf'"),
        ("mine", "it is a folder or file of yours, which this command never removes"),
    ],
)
def test_what_is_not_there_is_not_removed(full_cache: Path, tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "notes.gguf").write_bytes(b"")
    before = names()
    with pytest.raises(ModelNotFoundError) as error:
        remove_model(name)
    assert says.removesuffix("?") in str(error.value)
    assert names() == before and (tmp_path / "mine").is_dir() and (tmp_path / "notes.gguf").is_file()


def test_damaged_files_are_found_and_removed(full_cache: Path, tmp_path: Path) -> None:
    folder = full_cache / "models--org--small" / "snapshots" / COMMITS[0]
    assert check_files(folder) == 3
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_bytes(b"{}")
    assert check_files(tmp_path / "mine") == 0  # not of the hub
    for name in ("model.safetensors", "config.json"):
        (folder / name).resolve().write_bytes(b"0")
        with pytest.raises(CheckpointError, match=rf"{name}.*download again"):
            check_files(folder)
        assert not (folder / name).is_symlink()
    assert check_files(folder) == 1
    split = full_cache / "models--org--quants" / "snapshots" / COMMITS[0] / "big-00001-of-00002.gguf"
    assert check_files(split) == 2


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1500, "2 kB"), (999_600, "1 MB"), (1.44e9, "1.4 GB")]
)
def test_sizes_as_people_read_them(num_bytes: float, text: str) -> None:
    assert size_text(num_bytes) == text
