"""Scripted executors and Python programs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

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
