"""What a process has open is read while it runs (tests/support/descriptors.py, tests/support/listening.py)."""

from __future__ import annotations

import os
import socket
import subprocess

import pytest

from tests.support import descriptors
from tests.support.descriptors import num_descriptors, open_descriptors
from tests.support.listening import listening_hosts
from tests.support.processes import have_ended


def test_a_descriptor_that_is_closed_meanwhile_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the listing and the look at what is listed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        reader, writer = os.pipe()

        def list_and_close(path: str) -> list[str]:
            listed = real(path)
            os.close(writer)
            monkeypatch.undo()
            return listed

        real = descriptors.os.listdir
        monkeypatch.setattr(descriptors.os, "listdir", list_and_close)
        found = open_descriptors(os.getpid())
        assert found[reader].startswith("pipe:[") and found[server.fileno()].startswith("socket:[")
        assert writer not in found
        assert listening_hosts([os.getpid()]) == {"127.0.0.1"}
        os.close(reader)


def test_a_look_at_a_process_is_not_counted() -> None:
    """A thread of an executor reads files in /proc, while the test counts."""
    before = num_descriptors()
    with open("/proc/self/stat"), open(os.devnull):
        assert num_descriptors() == before + 1
    assert num_descriptors() == before


def test_a_process_that_has_ended_listens_nowhere() -> None:
    """Not even while its parent has not asked for its exit code."""
    with subprocess.Popen(["sleep", "300"]) as process:
        assert listening_hosts([process.pid]) == set()
        process.kill()
        assert have_ended([process.pid])
        assert listening_hosts([process.pid]) == set()
    assert listening_hosts([process.pid]) == set()
