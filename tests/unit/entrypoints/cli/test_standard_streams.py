"""Commands that are started with closed standard streams."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHECK = """
import os, sys
from inflight.entrypoints.cli.terminal import open_standard_streams
open_standard_streams()
null = os.stat(os.devnull)
print("text", flush=True)
sys.stderr.flush()
for number in map(int, sys.argv[1]):
    assert os.path.samestat(os.fstat(number), null) and os.get_inheritable(number), number
"""


@pytest.mark.parametrize(("closing", "closed"), [(">&-", "1"), ("2>&-", "2"), ("<&- >&- 2>&-", "012"), ("", "")])
def test_closed_streams_are_opened_and_are_empty(closing: str, closed: str) -> None:
    command = ["sh", "-c", f'"$@" {closing}', "sh", sys.executable, "-c", CHECK, closed]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if "1" in closed else "text\n")


def test_python_runs_the_package_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "inflight", "--version"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.strip()
