"""One part in a process of its own: what it prints is read as it comes, and what goes wrong with it stays with it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import Any, ClassVar

from benchmarks.gpu.parts import Part

ROOT = Path(__file__).parents[2]
ERROR_CHARACTERS = 800
MAX_FAILURES = 8  # of a part's tests, that are told
_PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when the thread that has started it ends
_DEATH_SIGNAL = ctypes.CDLL(None).prctl
_RESULT = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b")


@dataclass
class PartResult:
    """`status` is "ok", "failed", "out of time", "interrupted" or "skipped". `figures`: what the part emitted, by the name of
    the figure."""

    name: str
    status: str = "ok"
    seconds: float = 0.0
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)  # Any: JSON
    tests: Counter[str] = field(default_factory=Counter)  # "passed" -> how many
    failures: list[str] = field(default_factory=list)
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"status": self.status, "seconds": round(self.seconds, 1)}
        if self.error:
            found["error"] = self.error
        if self.tests:
            found["tests"] = dict(self.tests)
        if self.failures:
            found["failures"] = self.failures[:MAX_FAILURES]
        return found


class _Running:
    """The parts that run, in all threads."""

    lock = Lock()
    processes: ClassVar[set[subprocess.Popen[str]]] = set()
    is_ending = False  # no part begins any more


def end_all() -> None:
    """Kills the parts that run; no part begins any more. For a handler of signals."""
    _Running.is_ending = True
    for process in list(_Running.processes):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def run_part(
    part: Part,
    limit_seconds: float,
    log: Callable[[str], None],
    tell: Callable[[str], None],
    result: PartResult | None = None,
) -> PartResult:
    """Any thread. `log` gets every line, `tell` those that are results. `result` is filled while the part runs, so that what it
    has measured is there if this call never returns."""
    result = PartResult(part.name) if result is None else result
    result.status = "interrupted"  # until the part has ended
    start, last = time.perf_counter(), [""]

    def read_line(line: str) -> None:
        log(line)
        last[0] = line
        if part.is_test:
            _read_test(result, line, tell)
        elif line.startswith("{"):
            _read_figure(result, line, tell)

    search_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": search_path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        end_with_this_process = partial(_DEATH_SIGNAL, _PR_SET_PDEATHSIG, signal.SIGKILL)
        process = subprocess.Popen(
            [sys.executable, *part.arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=True,  # it may start processes, which end with it
            preexec_fn=end_with_this_process,  # one call of the system
        )
        with _Running.lock:
            _Running.processes.add(process)
        if _Running.is_ending:
            _kill(process)
        assert process.stdout is not None
        reader = Thread(target=_read_lines, args=(process.stdout, read_line), daemon=True)
        reader.start()
        status = "ok"
        try:
            process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            status = "out of time"
        except BaseException:  # an interrupt: no part outlives the check
            _kill(process)
            raise
        _kill(process)
        reader.join(5)
        process.stdout.close()
        errors.seek(0)
        error_text = errors.read()
    for line in error_text.splitlines():
        log(line)
    result.seconds = time.perf_counter() - start
    result.status = "interrupted" if _Running.is_ending else status
    if result.status == "ok" and process.returncode != 0:
        result.status = "failed"
    if result.status != "ok" and not result.failures:
        result.error = (error_text.strip() or last[0])[-ERROR_CHARACTERS:]
    if result.status == "out of time":
        result.failures.append(f"still running: {last[0].strip()[:200]}")
    if any("error" in figure for figure in result.figures.values()):
        result.status = "failed"
    return result


def _read_lines(lines: Any, read_line: Callable[[str], None]) -> None:  # Any: a text stream
    for line in lines:
        read_line(line.rstrip("\n"))


def _kill(process: subprocess.Popen[str]) -> None:
    """The whole session, also what an ended process has left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with _Running.lock:
        _Running.processes.discard(process)


def _read_figure(result: PartResult, line: str, tell: Callable[[str], None]) -> None:
    try:
        fields = json.loads(line)
    except ValueError:
        return  # a library's own output
    name = fields.pop("figure", None) or fields.pop("case", None)
    if name is not None:
        result.figures[name] = fields
        tell(json.dumps({"part": result.name, "figure": name, **fields}))


def _read_test(result: PartResult, line: str, tell: Callable[[str], None]) -> None:
    """Of `pytest -v -rfE`: a line a test, and at the end one for each failure, with its reason."""
    if found := _RESULT.match(line):
        result.tests[found[2].lower()] += 1
        if found[2] in ("FAILED", "ERROR"):
            tell(json.dumps({"part": result.name, "test": found[1], "result": found[2]}))
    elif line.startswith(("FAILED ", "ERROR ")):
        result.failures.append(line[:300])
