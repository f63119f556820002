"""The C++ kernels touch no memory but their own. `cpu/kernel_calls.py` calls all kernels of an instruction set."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from inflight.kernels.cpu import library
from inflight.kernels.cpu.compile_flags import COMMON_FLAGS, INSTRUCTION_SET_FLAGS, source_files
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="no C++ kernels here")
ROOT = Path(__file__).parents[3]
SOURCES = Path(library.__file__).parent
COMPILER = shutil.which("g++")
SANITIZE = ["-O0", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


class Calls:
    """What `tests/unit/kernels/cpu/kernel_calls.py` has printed, for each of its processes."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        command = [sys.executable, "-m", "tests.unit.kernels.cpu.kernel_calls", *arguments]
        given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False)
        self.lines, self.errors = done.stdout.splitlines(), done.stderr
        assert done.returncode == 0, self.errors

    def end_of(self, job: str) -> list[str]:
        """The last call of a process, and its exit code."""
        return [line.removeprefix(f"{job}: ") for line in self.lines if line.startswith(f"{job}: ")][-2:]


@pytest.fixture(scope="module")
def guarded() -> Calls:
    return Calls(*INSTRUCTION_SETS_HERE)


@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
def test_beside_pages_that_nothing_may_touch(name: str, guarded: Calls) -> None:
    assert guarded.end_of(name) == ["before: a tape", "exit code 0"], guarded.errors


@pytest.mark.parametrize("side", ["behind", "before"])
@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
def test_a_page_that_was_touched_ends_the_process(name: str, side: str, guarded: Calls) -> None:
    wanted = [f"{side}: one element too many", f"exit code {-signal.SIGSEGV}"]
    assert guarded.end_of(f"{name} {side} a buffer") == wanted, guarded.errors


def build_sanitized(name: str, folder: Path) -> None:
    assert COMPILER is not None
    flags = [*COMMON_FLAGS, *INSTRUCTION_SET_FLAGS[name], *SANITIZE, "-w", "-fPIC", "-DINFLIGHT_SOURCE_HASH=0"]
    sources = [path for path in source_files(SOURCES) if path.suffix == ".cpp"]
    objects = [folder / f"{path.stem}.o" for path in sources]
    for path, compiled in zip(sources, objects, strict=True):
        subprocess.run([COMPILER, *flags, "-c", path, "-o", compiled], check=True)
    library_path = folder / f"_{name}{EXTENSION_SUFFIXES[0]}"
    subprocess.run([COMPILER, "-shared", *SANITIZE, *objects, "-o", library_path], check=True)


@pytest.mark.full
@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
@pytest.mark.skipif(COMPILER is None, reason="no g++ here")
def test_under_the_address_sanitizer(name: str, tmp_path: Path) -> None:
    assert COMPILER is not None
    build_sanitized(name, tmp_path)
    found = subprocess.run([COMPILER, "-print-file-name=libasan.so"], check=True, capture_output=True, text=True)
    environment = {
        "LD_PRELOAD": found.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    calls = Calls(name, "--sanitized", str(tmp_path), **environment)
    assert calls.end_of(name) == ["sanitized: a tape", "exit code 0"], calls.errors
    for side in ("behind", "before"):
        assert calls.end_of(f"{name} {side} a buffer") == ["sanitized: one element too many", "exit code 1"]
    assert calls.errors.count("ERROR: AddressSanitizer: heap-buffer-overflow") == 2, "the calls that were to go wrong"
