"""team.h and parts.h under sanitizers: more threads than cores, tasks without pauses, and helpers that sleep between tasks."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from inflight.kernels.cpu import library

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(
    COMPILER is None or platform.machine() != "x86_64" or not (library._FOLDER / "team.h").exists(),
    reason="no compiler, or no sources",
)


@pytest.mark.parametrize("sanitizer", ["thread", pytest.param("address", marks=pytest.mark.full)])
def test_every_task_is_done_once_and_in_order(tmp_path: Path, sanitizer: str) -> None:
    program = tmp_path / "team"
    flags = ["-std=c++17", "-O1", "-Wall", "-Werror", f"-fsanitize={sanitizer}", "-pthread", f"-I{library._FOLDER}"]
    source = Path(__file__).with_suffix(".cpp")
    subprocess.run([str(COMPILER), *flags, str(source), "-o", str(program)], check=True, timeout=120)
    for num_threads, num_tasks in ((1, 100), (2, 400), (5, 100), (64, 40)):
        done = subprocess.run([program, str(num_threads), str(num_tasks)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
