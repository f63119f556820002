"""Finding and waiting for processes that are not children of the test."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.robustness.fault_server import descendants
from inflight.executor.multiproc import MultiprocExecutor
from tests.architecture.source import ROOT
from tests.conformance.configs import engine_config
from tests.support.python_process import PythonProcess

SCRIPTED = "tests.conformance.scripted_worker:ScriptedWorker"


# a shell starts `pytest &` with SIGINT ignored, which all processes below inherit
INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def scripted_executor(num_ranks: int = 2, *, budget: float = 10.0, name: str = "scripted") -> MultiprocExecutor:
    return MultiprocExecutor(
        engine_config(tensor_parallel_size=num_ranks, backend="mp", budget=budget, name=name), SCRIPTED
    )


def exists(pid: int) -> bool:
    """A zombie does not exist any more: nothing of it is left but its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def have_ended(pids: Iterable[int], seconds: float) -> bool:
    """Wait until none of them exists any more. Any process may ask, not only the parent."""
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([pidfd], [], [], seconds)[0]:
                return False
        finally:
            os.close(pidfd)
    return True


def children(pid: int) -> list[int]:
    """All processes below `pid`."""
    return descendants(pid)[1:]


class Script(PythonProcess):
    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is not None:
            self.kill()  # the test has failed: nobody waits for it
        super().__exit__(kind, error, traceback)


def run_script(script: str, *arguments: str, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
    """A Python program beside the test, with the test's import path and piped streams. `prefix` is the command that runs it."""
    return (subprocess.Popen if prefix else Script)(
        [*prefix, sys.executable, "-u", "-c", INTERRUPTIBLE + textwrap.dedent(script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def pids_of(executor: MultiprocExecutor) -> list[int]:
    pids: list[int] = executor.collective_rpc("pid")
    return pids
