"""The socket of a model's process: who can connect, and that nothing is left of it."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from inflight.entrypoints.router.hidden_socket import NOWHERE, HiddenSocket
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.errors import ConfigError
from tests.support.descriptors import open_descriptors


def settings_for(path: str) -> ServerSettings:
    return ServerSettings(uds=path)


def connect(path: str) -> int:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_only_this_process_connects_and_no_file_is_left(folder: Path) -> None:
    before = open_descriptors(os.getpid())
    hidden = HiddenSocket(settings_for)
    assert list(folder.iterdir()) == []
    path = hidden.path
    assert connect(path) == 0
    hidden.listener.close()
    assert connect(path) == errno.ECONNREFUSED  # the process has ended
    hidden.close()
    assert hidden.path == NOWHERE and connect(hidden.path) == errno.ENOENT and connect(path) == errno.ENOENT
    assert open_descriptors(os.getpid()) == before


def test_each_model_has_its_own(folder: Path) -> None:
    first, second = HiddenSocket(settings_for), HiddenSocket(settings_for)
    first.listener.setblocking(False)
    assert connect(second.path) == 0
    with pytest.raises(BlockingIOError):
        first.listener.accept()
    for each in (first, second):
        each.listener.close()
        each.close()


def test_a_long_temporary_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = folder / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    hidden = HiddenSocket(settings_for)
    assert connect(hidden.path) == 0
    hidden.listener.close()
    hidden.close()


def test_what_fails_leaves_nothing(folder: Path) -> None:
    def refuse(path: str) -> ServerSettings:
        raise ConfigError("wrong")

    before = open_descriptors(os.getpid())
    with pytest.raises(ConfigError, match="wrong"):
        HiddenSocket(refuse)
    assert list(folder.iterdir()) == [] and open_descriptors(os.getpid()) == before
