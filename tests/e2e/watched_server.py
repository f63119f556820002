"""`inflight serve` as a process of its own, for tests: its address, its engine, what it counts and logs."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx

from benchmarks.robustness.fault_server import descendants
from tests.support.python_process import PythonProcess
from tests.support.waits import wait_until

_COMMAND = "import sys; from inflight.entrypoints.cli.main import main; sys.exit(main())"
_BASELINE = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_READY = re.compile(r"ready: (http://\S+) serves")


@dataclass
class WatchedServer:
    """A server that is ready. `log`: its lines so far, which a thread reads."""

    popen: subprocess.Popen[str]
    url: str
    log: list[str] = field(default_factory=list)

    @property
    def engine_pid(self) -> int:
        """Of the one process below that runs the engine core."""

        def engines() -> list[int]:
            lines.clear()
            for pid in descendants(self.popen.pid)[1:]:
                with contextlib.suppress(OSError):  # it has just ended
                    lines[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
            return [pid for pid, line in lines.items() if b"engine.process.core_process" in line]

        lines: dict[int, bytes] = {}
        # Once, while four test runs shared two cores, the only process below had another command line.
        (engine,) = wait_until(lambda: found if len(found := engines()) == 1 else [], lambda: lines)
        return engine

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        assert url.port is not None
        return url.host, url.port

    def counts(self) -> dict[str, float]:
        """What runs, what waits, and the share of KV blocks in use, as /metrics says."""
        text = httpx.get(f"{self.url}/metrics", timeout=300).text
        found = dict(re.findall(r"^inflight:(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE))
        return {name: float(found[name]) for name in _BASELINE}

    def seconds_to_baseline(self, limit: float = 10.0) -> float:
        """Until nothing runs or waits, and no KV block is held."""
        begin = time.monotonic()
        while any(self.counts().values()):
            assert time.monotonic() - begin < limit, self.counts()
            time.sleep(0.02)
        return time.monotonic() - begin


@contextlib.contextmanager
def serve_process(*options: str) -> Iterator[WatchedServer]:
    """The embedded model in float32, on a free port. It is asked to end, and has ended well afterwards."""
    arguments = ["serve", "--port", "0", "--dtype", "float32", "--num-threads", "1", *options]
    popen = PythonProcess([sys.executable, "-c", _COMMAND, *arguments], stderr=subprocess.PIPE, text=True)
    assert popen.stderr is not None
    log: list[str] = []
    found = _wait_until_ready(popen.stderr, log)
    reader = threading.Thread(target=log.extend, args=(popen.stderr,))
    reader.start()
    try:
        assert found is not None, "".join(log)
        yield WatchedServer(popen, found, log)
    finally:
        popen.terminate()
        code = popen.wait(300)
        reader.join()
        popen.stderr.close()
    assert code == 0, "".join(log)


def _wait_until_ready(lines: IO[str], log: list[str]) -> str | None:
    for line in lines:
        log.append(line)
        if match := _READY.search(line):
            return match[1]
    return None
