"""The folder of packed weights: whose it may be, who writes, and what is deleted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inflight.weight_cache.folder import INDEX, PARTIAL, PEAKS, WEIGHTS, CacheFolder, UnusableFolderError


def fill(folder: CacheFolder, key: str, num_bytes: int, used_at: float) -> None:
    folder.file(key, WEIGHTS).write_bytes(bytes(num_bytes))
    folder.file(key, INDEX).write_bytes(b"")
    os.utime(folder.file(key, INDEX), (used_at, used_at))


@pytest.fixture
def folder(tmp_path: Path) -> CacheFolder:
    made = CacheFolder(tmp_path / "a" / "weights")
    made.check()
    return made


def test_it_is_the_users_alone(folder: CacheFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folder.path.stat().st_mode & 0o777 == 0o700
    for mode in (0o770, 0o707, 0o777):
        folder.path.chmod(mode)
        with pytest.raises(UnusableFolderError, match="chmod go-w"):
            folder.check()
    folder.path.chmod(0o755)
    folder.check()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UnusableFolderError, match="XDG_CACHE_HOME"):
        folder.check()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnusableFolderError, match="cannot be used"):
        CacheFolder(tmp_path / "file" / "weights").check()


def test_files_of_others_are_not_opened(folder: CacheFolder) -> None:
    fill(folder, "x", 1, 0)
    opened = folder.open("x", WEIGHTS)
    assert opened is not None
    os.close(opened)
    folder.file("x", WEIGHTS).chmod(0o602)
    assert folder.open("x", WEIGHTS) is None
    assert folder.open("y", WEIGHTS) is None
    folder.file("pipe", WEIGHTS).symlink_to(folder.file("x", INDEX))
    assert folder.open("pipe", WEIGHTS) is None


def test_what_cannot_be_read_whole_is_not_opened(folder: CacheFolder) -> None:
    """A pipe would wait for somebody who writes to it, and a damaged file system may give any size."""
    for suffix in (WEIGHTS, INDEX, PEAKS):
        os.mkfifo(folder.file("pipe", suffix), 0o600)
        assert folder.open("pipe", suffix) is None
        folder.file("large", suffix).touch(0o600)
        os.truncate(folder.file("large", suffix), 1 << 40)
        opened = folder.open("large", suffix)
        assert (opened is not None) == (suffix == WEIGHTS)  # which are mapped
        if opened is not None:
            os.close(opened)


def test_one_process_writes_an_entry_at_a_time(folder: CacheFolder) -> None:
    with folder.partial("x") as first, folder.partial("x") as second:
        assert first is not None
        assert second is None
        os.write(first, b"half")
    assert not list(folder.path.iterdir())
    folder.file("x", PARTIAL).write_bytes(b"of a process that was killed")
    with folder.partial("x") as opened:
        assert opened is not None
        assert not os.fstat(opened).st_size
        os.replace(folder.file("x", PARTIAL), folder.file("x", WEIGHTS))
    assert [path.name for path in folder.path.iterdir()] == ["x.weights"]


def test_the_least_recently_used_go_first(folder: CacheFolder) -> None:
    for key, used_at in (("old", 1.0), ("new", 3.0), ("middle", 2.0)):
        fill(folder, key, 100, used_at)
    folder.file("killed", WEIGHTS).write_bytes(bytes(100))
    folder.file("killed", PARTIAL).write_bytes(bytes(100))
    folder.make_room(100, 400)
    assert [entry.key for entry in folder.entries()] == ["old", "middle", "new"]
    assert not folder.file("killed", PARTIAL).exists()
    folder.touch("old")
    folder.make_room(150, 300)
    assert [entry.key for entry in folder.entries()] == ["old"]
    with folder.partial("now") as opened:
        assert opened is not None
        folder.make_room(300, 300)
        assert folder.file("now", PARTIAL).exists()
    assert not folder.entries()
