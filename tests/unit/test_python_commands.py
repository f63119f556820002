"""`tests.support.python_commands`: a command behaves as the program it stands for, and ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.python_commands import python_commands

SECONDS = 300.0


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    with python_commands() as programs:
        yield {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}


def test_streams_arguments_folder_and_exit_code(environment: dict[str, str], tmp_path: Path) -> None:
    script = "import os, sys; print(sys.argv[1:], os.getcwd(), input()); print('told', file=sys.stderr); sys.exit(3)"
    done = subprocess.run(
        ["python", "-c", script, "a", "b c"],
        env=environment,
        cwd=tmp_path,
        input="typed\n",
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, f"['a', 'b c'] {tmp_path} typed\n", "told\n")


def test_the_command_line(environment: dict[str, str]) -> None:
    done = subprocess.run(["inflight", "--version"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "inflight" in done.stdout


def started(environment: dict[str, str], first: str = "pass") -> tuple[subprocess.Popen[str], int]:
    script = f"import os, signal, sys, time; {first}; print(os.getpid(), flush=True); time.sleep({SECONDS})"
    program = subprocess.Popen(["python", "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    return program, int(program.stdout.readline())


def test_a_signal_is_passed_on(environment: dict[str, str]) -> None:
    with started(environment)[0] as program:
        program.terminate()
        assert program.wait(SECONDS) == -signal.SIGTERM
    with started(environment, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))")[0] as program:
        program.terminate()
        assert program.wait(SECONDS) == 5


def test_who_kills_the_program_kills_the_process(environment: dict[str, str]) -> None:
    program, pid = started(environment)
    with program:
        program.kill()
    end = time.monotonic() + SECONDS
    with suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.kill(pid, 0)
            time.sleep(0.01)
        pytest.fail("the process outlived the program")
