"""Where the file is, and what is left of it when the server ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.entrypoints.response_store.place import StorePlace, check_place
from inflight.entrypoints.response_store.processes import is_running, own_name
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextlib.contextmanager
def closing_fd(folder: Path) -> Iterator[int]:
    opened = os.open(folder, os.O_RDONLY)
    yield opened
    os.close(opened)


def test_a_temporary_file_goes_with_its_server(folder: Path) -> None:
    place = StorePlace(ServerSettings())
    path = Path(place.settings.response_store)
    assert path.parent.parent == folder
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.write_text("x")
    with (
        pytest.raises(BlockingIOError),
        closing_fd(path.parent) as opened,
    ):  # what systemd-tmpfiles asks, see tmpfiles.d(5)
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    other = StorePlace(ServerSettings())  # a second server leaves it alone
    assert path.exists()
    other.close()
    place.close()
    assert list(folder.iterdir()) == []


def test_what_a_killed_server_has_left_is_removed(folder: Path) -> None:
    dead = own_name().rpartition("-")[0] + "-1"  # the same process id, but started at another time
    assert is_running(own_name()) and not is_running(dead) and not is_running("x") and not is_running("")
    left = folder / f"inflight-responses-{dead}-abc"
    left.mkdir()
    (left / "responses.sqlite").write_text("x")
    linked = folder / f"inflight-responses-{dead}-link"
    linked.symlink_to(folder)
    place = StorePlace(ServerSettings())
    assert not left.exists() and linked.is_symlink()
    place.close()


def test_a_killed_process_does_not_run_even_if_its_parent_does_not_look() -> None:
    code = "from inflight.entrypoints.response_store.processes import own_name; print(own_name(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        name = child.stdout.readline().strip()
        assert is_running(name)
        child.kill()
        os.waitid(
            os.P_PID, child.pid, os.WEXITED | os.WNOWAIT
        )  # until it has ended, and leaves its exit code where it is
        assert not is_running(name)


def test_without_a_temporary_folder_nothing_is_stored(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tempfile.tempdir = str(folder / "none")
    assert StorePlace(ServerSettings()).settings.response_store == "none"
    assert len(caplog.records) == 1 and "no responses are stored" in caplog.text


def test_a_file_of_the_users_stays(tmp_path: Path) -> None:
    chosen = tmp_path / "responses.sqlite"
    place = StorePlace(ServerSettings(response_store=str(chosen)))
    place.close()
    assert place.settings.response_store == str(chosen) and chosen.exists()


@pytest.mark.parametrize("name", ["none-such/r.sqlite", "folder", "text", "damaged", "x" * 300])
@pytest.mark.parametrize("checks", [False, True], ids=["start", "--check"])
def test_a_file_that_cannot_be_used_is_an_error_at_the_start(tmp_path: Path, name: str, checks: bool) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("not a database " * 100)
    StorePlace(ServerSettings(response_store=str(tmp_path / "damaged"))).close()
    with (tmp_path / "damaged").open("r+b") as damaged:
        damaged.seek(4096)  # the header stays
        damaged.write(b"\xff" * 40_000)
    settings = ServerSettings(response_store=str(tmp_path / name))
    with pytest.raises(ConfigError, match="response_store="):
        check_place(settings) if checks else StorePlace(settings)


def test_a_check_makes_no_file(tmp_path: Path) -> None:
    check_place(ServerSettings(response_store=str(tmp_path / "r.sqlite")))
    check_place(ServerSettings())
    assert list(tmp_path.iterdir()) == []
