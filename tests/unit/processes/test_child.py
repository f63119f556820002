"""What each process of ours runs first, and what it then is: bound to its parent, or on its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.processes.child_process import child_command
from inflight.processes.working_folder import working_folder
from tests.architecture.source import ROOT
from tests.support.processes import have_ended

MODULE = """
import ctypes, json, os, sys
death = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death), 0, 0, 0)  # PR_GET_PDEATHSIG
said = {"argv": sys.argv, "name": __name__, "death": death.value, "leads": os.getsid(0) == os.getpid(), "pid": os.getpid()}
with open(os.environ["SAID"], "w") as file:
    json.dump(said, file)
print("text", flush=True)
"""


@pytest.fixture
def said(tmp_path: Path) -> Path:
    (tmp_path / "some_module.py").write_text(MODULE)
    return tmp_path / "said.json"


def start(parent: int, said: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{said.parent}", "SAID": str(said)}
    command = [sys.executable, *child_command(parent, ["some_module", "a title", "7"])]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_program_is_killed_with_its_parent(said: Path) -> None:
    done = start(os.getpid(), said)
    assert (done.returncode, done.stdout, done.stderr) == (0, "text\n", "")
    found = json.loads(said.read_text())
    assert found["argv"][1:] == ["a title", "7"] and found["argv"][0].endswith("some_module.py")
    assert (found["name"], found["death"], found["leads"]) == ("__main__", signal.SIGKILL, False)


def test_a_program_whose_parent_is_gone_already_does_not_begin(said: Path) -> None:
    done = start(os.getpid() + 1, said)  # not the process that starts it
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and not said.exists()


def test_a_program_may_outlive_its_parent(said: Path) -> None:
    """It says its id, and then leaves the output of its parent alone."""
    done = start(0, said)
    pid = int(done.stdout)
    assert done.returncode == 0 and have_ended([pid])
    found = json.loads(said.read_text())
    assert (found["pid"], found["leads"], found["death"]) == (pid, True, 0)
    assert done.stderr == "text\n"


def test_the_folder_of_a_new_process_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert working_folder() == str(folder)
    folder.rmdir()
    assert working_folder() == "/"
