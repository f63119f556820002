"""What is said about a model that is not found or not whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight import hub
from inflight.config.safetensors_file import check_files_exist, find_files
from inflight.errors import CheckpointError, ModelNotFoundError, TokenizerError
from inflight.model_advice import cached_models, models_below, near_models, unfinished_download
from inflight.tokenizer.folder_tokenizer import folder_tokenizer


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache with two models, and a working folder with two models and two other entries."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("models--Qwen--Qwen3-0.6B", "models--org--other", "datasets--org--texts"):
        (tmp_path / "hub" / name / "snapshots" / "abc").mkdir(parents=True)
        (tmp_path / "hub" / name / "blobs").mkdir()
    work = tmp_path / "work"
    for name in ("my-model", "plain"):
        (work / name).mkdir(parents=True)
    (work / "my-model" / "config.json").touch()
    (work / "large.gguf").touch()
    (work / "my-modes.txt").touch()
    monkeypatch.chdir(work)
    return tmp_path / "hub"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("./my-modl", "'my-model'"),
        ("My-Model2", "'my-model'"),
        ("large.guf", "'large.gguf'"),
        ("qwen3", "'Qwen/Qwen3-0.6B'"),
        ("Qwen3-0.6b", "'Qwen/Qwen3-0.6B'"),
        ("qwen/qwen3-06b", "'Qwen/Qwen3-0.6B'"),
        ("plane", ""),
        ("nothing-like-it", ""),
        ("/no/such/place/m", ""),
    ],
)
def test_names_that_are_near(cache: Path, name: str, near: str) -> None:
    assert near_models(name) == (f"; did you mean {near}" if near else "")
    if "/" not in name.removeprefix("./"):
        with pytest.raises(ModelNotFoundError, match=near or "there is no folder"):
            hub.check_model_name(name)


def test_the_cache_is_where_the_hub_library_has_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cached_models() == ["Qwen/Qwen3-0.6B", "org/other"]
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(cache.parent))
    assert cached_models() == ["Qwen/Qwen3-0.6B", "org/other"]
    monkeypatch.setenv("HF_HOME", "/no/such/folder")
    assert cached_models() == []


def test_models_in_a_folder_above_them(cache: Path) -> None:
    work = Path.cwd()
    (work / "large.gguf").unlink()
    assert models_below(work) == f"; models in it: {str(work / 'my-model')!r}"
    assert models_below(cache) == "; models in it: 'Qwen/Qwen3-0.6B' or 'org/other'"
    assert "'Qwen/Qwen3-0.6B'" in models_below(cache / "models--Qwen--Qwen3-0.6B")
    assert models_below(work / "plain") == models_below(work / "none") == ""
    for folder, advice in ((work, "my-model"), (cache / "models--org--other", "give the hub id 'org/other'")):
        with pytest.raises(ModelNotFoundError, match=advice):
            hub.resolve_model_folder(str(folder))


@pytest.mark.parametrize("name", ["model.safetensors.part", "model.safetensors.crdownload", "x.aria2", "y.incomplete"])
def test_an_unfinished_download_is_told(cache: Path, name: str) -> None:
    folder = Path.cwd() / "my-model"
    assert unfinished_download(folder) == ""
    with pytest.raises(CheckpointError, match="other formats are not read"):
        find_files(folder)
    (folder / name).touch()
    with pytest.raises(CheckpointError, match=f"download is unfinished.*{name}"):
        find_files(folder)


def test_an_unfinished_download_of_the_hub_names_its_command(cache: Path) -> None:
    snapshot = cache / "models--Qwen--Qwen3-0.6B" / "snapshots" / "abc"
    assert unfinished_download(snapshot) == ""
    (snapshot.parent.parent / "blobs" / "0123.incomplete").touch()
    assert "`hf download Qwen/Qwen3-0.6B`" in unfinished_download(snapshot)
    (snapshot / "model-00001-of-00002.safetensors").touch()
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    (snapshot / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"1 of the 2 .*model-00002-of-00002"):
        check_files_exist(snapshot)


def test_an_unfinished_download_is_told_whatever_file_is_missing(cache: Path) -> None:
    snapshot = cache / "models--Qwen--Qwen3-0.6B" / "snapshots" / "abc"
    (snapshot.parent.parent / "blobs" / "0123.incomplete").touch()
    with pytest.raises(ModelNotFoundError, match=r"no config\.json.*hf download Qwen/Qwen3-0.6B"):
        hub.resolve_model_folder(str(snapshot))
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json.*hf download Qwen/Qwen3-0.6B"):
        folder_tokenizer(snapshot)
    for name in ("m.gguf.part", "m.gguf.incomplete", "m.gguf.crdownload"):
        (Path.cwd() / name).touch()
        with pytest.raises(ModelNotFoundError, match=f"'./m.gguf'.*unfinished.*{name}"):
            hub.check_model_name("./m.gguf")
        (Path.cwd() / name).unlink()


def test_an_adapter_names_its_base_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(ModelNotFoundError, match="give the base model, 'org/base'"):
        hub.resolve_model_folder(str(tmp_path))
