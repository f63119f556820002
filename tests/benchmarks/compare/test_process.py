"""An engine in a process of its own is stopped while it waits; one that ends too early is named."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from benchmarks.compare.driver import Settings
from benchmarks.compare.engines import Engine
from benchmarks.compare.process import EngineProcess
from inflight.entrypoints.cli.workloads import Workload

ECHO = '''#!{python}
"""Stands in for the interpreter of an engine: answers every line, and says how much processor time has passed."""
import json, sys, time
settings = json.loads(sys.argv[3])
assert sys.argv[1:3] == ["-m", "benchmarks.compare.drivers.llamacpp"] and settings["weight_format"] == "q8_0"
now = time.monotonic()
print(json.dumps(dict(imported_at=now, constructed_at=now + 1, first_token_at=now + 3)), flush=True)
for line in sys.stdin:
    if line.strip():
        request = json.loads(line)
        tokens = len(request["prompts"]) * request["output_len"]
        print(json.dumps(dict(seconds=2.0, num_tokens=tokens - (request["output_len"] == 7))), flush=True)
    else:
        print(json.dumps(dict(peak_bytes=123)), flush=True)
'''


def test_an_engine_that_waits_is_stopped(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(ECHO.format(python=sys.executable))
    python.chmod(0o755)
    settings = Settings(
        folder="f", weight_format="q8_0", max_model_len=8, max_num_seqs=8, max_kv_tokens=64, kv_bytes=1 << 30
    )
    with EngineProcess(Engine("llamacpp", "q8_0", python), settings) as process:
        assert process.startup.constructor == pytest.approx(1.0)
        assert process.startup.total > 3.0
        assert state_of(process) == "T"
        assert process.run(Workload("decode8", 8, 16, 4)) == 16.0
        assert process.run(Workload("prefill", 2, 100, 1)) == 100.0
        assert process.peak_bytes() == 123
        assert state_of(process) == "T"
        with pytest.raises(SystemExit, match=r"produced 6 .*of 7 "):
            process.run(Workload("short", 1, 1, 7))
    assert process._process.poll() == 0
    with EngineProcess(Engine("llamacpp", "q8_0", python), settings) as process:
        os.killpg(process._process.pid, signal.SIGKILL)
        with pytest.raises(SystemExit, match="ended with -9"):
            process.run(Workload("short", 1, 1, 1))


def state_of(process: EngineProcess) -> str:
    """As the kernel says it; a signal takes a moment to act."""
    stat = Path(f"/proc/{process._process.pid}/stat")
    for _ in range(30_000):
        state = stat.read_text().rpartition(")")[2].split()[0]
        if state == "T":
            break
        time.sleep(0.01)
    return state
