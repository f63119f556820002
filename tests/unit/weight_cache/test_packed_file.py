"""Packed files that are damaged, foreign or half-written, and disks that are full: the model is loaded without them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from inflight.weight_cache import packed_file
from inflight.weight_cache.folder import CacheFolder
from inflight.weight_cache.packed_file import Layout, PackedFileError, open_packed
from tests.support.cached_weights import load_cached, use_cache
from tests.support.full_context_attention import load, run_prompt
from tests.support.model_zoo import FAMILY_CONFIGS, write_model

PROMPT = torch.arange(9)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(FAMILY_CONFIGS["qwen3"][0], tmp_path_factory.mktemp("model") / "model", seed=1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_cache(tmp_path / "cache", monkeypatch)


def only(cache: Path, suffix: str) -> Path:
    (found,) = cache.glob(f"*{suffix}")
    return found


def flip(path: Path, offset: int, *, hides: bool = False) -> None:
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    if hides:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def copy_in_place(path: Path) -> None:
    copy = path.with_suffix(".copy")
    shutil.copy2(path, copy)
    copy.replace(path)


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "a changed byte": lambda weights, _: flip(weights, 1000),
    "a changed byte, with the old time": lambda weights, _: flip(weights, 1000, hides=True),
    "cut off": lambda weights, _: os.truncate(weights, weights.stat().st_size // 2),
    "empty": lambda weights, _: os.truncate(weights, 0),
    "another file": lambda weights, _: weights.write_bytes(bytes(weights.stat().st_size)),
    "a copy": lambda weights, _: copy_in_place(weights),
    "no weights": lambda weights, _: weights.unlink(),
    "no index": lambda _, index: index.unlink(),
    "an index with a changed byte": lambda _, index: flip(index, 100),
    "an index that is cut off": lambda _, index: os.truncate(index, 50),
    "an empty index": lambda _, index: os.truncate(index, 0),
    "writable by others": lambda weights, _: weights.chmod(0o666),
    "a link": lambda weights, _: weights.symlink_to(weights.rename(weights.with_suffix(".moved"))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_not_what_was_written_is_made_again(
    damage: str, model: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    truth = run_prompt(load(model), PROMPT)
    load_cached(model)
    DAMAGES[damage](only(cache, ".weights"), only(cache, ".index"))
    caplog.clear()
    again = load_cached(model)
    assert not again.mapped_bytes
    assert torch.equal(run_prompt(again, PROMPT), truth)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == (0 if damage == "no index" else 1), told
    mapped = load_cached(model)
    assert mapped.mapped_bytes
    assert torch.equal(run_prompt(mapped, PROMPT), truth)


def test_the_file_of_another_model_is_refused(model: Path, cache: Path, tmp_path: Path) -> None:
    """Its index is right, and its weights are those of the index: the model does not fit."""
    for name in ("qwen3", "llama"):
        other = write_model(FAMILY_CONFIGS[name][1], tmp_path / name, seed=2)
        load_cached(other)
        key = only(cache, ".index").stem
        load_cached(model)
        (own,) = {path.stem for path in cache.glob("*.index")} - {key}
        for suffix in (".index", ".weights"):
            os.rename(cache / f"{key}{suffix}", cache / f"{own}{suffix}")
        truth = run_prompt(load(model), PROMPT)
        assert torch.equal(run_prompt(load_cached(model), PROMPT), truth)
        shutil.rmtree(cache)


def test_a_changed_page_is_no_change_of_the_file(model: Path, cache: Path) -> None:
    load_cached(model)
    weights = only(cache, ".weights")
    before = weights.read_bytes()
    mapped = load_cached(model)
    for parameter in mapped.parameters():
        parameter.data.zero_()
    assert weights.read_bytes() == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_nothing(
    number: int, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fails)
        caplog.clear()
        model_without = load_cached(model)
    assert not model_without.mapped_bytes
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    assert not list(cache.iterdir())
    load_cached(model)
    assert load_cached(model).mapped_bytes


def test_a_model_that_is_larger_than_the_limit(model: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_cached(model, limit_bytes=1 << 20)
    assert "weight_cache_gb" in caplog.text
    assert not list(cache.glob("*.weights"))


def test_a_disk_that_is_nearly_full(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage(cache.parents[2])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(used=20 * 2**30, free=2**30))
    load_cached(model)
    assert "of the disk are free" in caplog.text
    assert not list(cache.glob("*.weights"))


def test_a_tensor_outside_of_the_file(model: Path, cache: Path) -> None:
    load_cached(model)
    file = open_packed(CacheFolder(cache), only(cache, ".index").stem)
    assert file is not None
    layout = Layout()
    stored = layout.add(torch.zeros(len(file.content) + 1, dtype=torch.uint8))
    for spoilt in (stored, packed_file.StoredTensor(1, "uint8", (1,)), packed_file.StoredTensor(0, "Tensor", (1,))):
        with pytest.raises(PackedFileError):
            file.tensor(spoilt)
