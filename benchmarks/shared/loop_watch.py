"""`inflight serve` with a watch on its event loop: which callback works or waits the longest.

The loop is asyncio's own here: uvloop's, which the server has otherwise, cannot be watched from Python.

`WatchedProcess` starts it. The watch writes what it has seen since the last time into a file, when it gets SIGUSR2.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.shared.served_process import ServedProcess

FILE = "BENCHMARK_LOOP_FILE"
LONG_SECONDS = 0.001  # callbacks that take longer are kept


class WatchedProcess(ServedProcess):
    """One front end, with the arguments of `ServedProcess`. `file`: the watch writes into it."""

    command = "from benchmarks.shared.loop_watch import main; main()"

    def __init__(self, options: Mapping[str, Any], file: Path) -> None:  # Any: as the option takes it
        self._file = file
        super().__init__(options, {FILE: str(file)})

    def take(self) -> list[tuple[float, float, str]]:
        """For each long callback since the last call: its seconds, its processor time, and what it was."""
        self._file.unlink(missing_ok=True)
        os.kill(self.pid, signal.SIGUSR2)
        while not self._file.exists():
            time.sleep(0.01)
        num_callbacks, seen = json.loads(self._file.read_text(encoding="utf-8"))
        if not num_callbacks:
            raise SystemExit("the watch has seen no callback of the event loop")
        return [tuple(each) for each in seen]


def main() -> None:
    seen: list[tuple[float, float, str]] = []
    num_callbacks = 0
    run = asyncio.Handle._run

    def watched(handle: asyncio.Handle) -> None:
        nonlocal num_callbacks
        num_callbacks += 1
        begin, work = time.perf_counter(), time.thread_time()
        run(handle)
        if (seconds := time.perf_counter() - begin) > LONG_SECONDS:
            seen.append((seconds, time.thread_time() - work, _name(handle)))

    def write(*_: object) -> None:
        target = Path(os.environ[FILE])
        unfinished = target.with_suffix(".tmp")
        unfinished.write_text(json.dumps([num_callbacks, seen]), encoding="utf-8")
        seen.clear()
        unfinished.rename(target)

    uvloop.new_event_loop = asyncio.new_event_loop  # type: ignore[assignment]
    asyncio.Handle._run = watched  # type: ignore[method-assign, assignment]
    signal.signal(signal.SIGUSR2, write)
    from inflight.entrypoints.cli.main import main as serve

    serve()


def _name(handle: Any) -> str:  # Any: of asyncio
    task = getattr(handle._callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return getattr(task.get_coro(), "__qualname__", str(task.get_coro()))
    return getattr(handle._callback, "__qualname__", str(handle._callback))
