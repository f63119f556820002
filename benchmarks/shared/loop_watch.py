"""`inflight serve` with a watch on its event loop: which callback works or waits the longest.

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

from benchmarks.shared.served_process import ServedProcess

FILE = "INFLIGHT_BENCHMARK_LOOP_FILE"
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
        return [tuple(each) for each in json.loads(self._file.read_text(encoding="utf-8"))]


def main() -> None:
    seen: list[tuple[float, float, str]] = []
    run = asyncio.Handle._run

    def watched(handle: asyncio.Handle) -> None:
        begin, work = time.perf_counter(), time.thread_time()
        run(handle)
        if (seconds := time.perf_counter() - begin) > LONG_SECONDS:
            seen.append((seconds, time.thread_time() - work, _name(handle)))

    def write(*_: object) -> None:
        target = Path(os.environ[FILE])
        unfinished = target.with_suffix(".tmp")
        unfinished.write_text(json.dumps(seen), encoding="utf-8")
        seen.clear()
        unfinished.rename(target)

    asyncio.Handle._run = watched  # type: ignore[method-assign, assignment]
    signal.signal(signal.SIGUSR2, write)
    from inflight.entrypoints.cli.main import main as serve

    serve()


def _name(handle: Any) -> str:  # Any: of asyncio
    task = getattr(handle._callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return getattr(task.get_coro(), "__qualname__", str(task.get_coro()))
    return getattr(handle._callback, "__qualname__", str(handle._callback))
