"""`FaultServer`: an `inflight serve` that a benchmark damages: its processes, the times of its log lines, its fault status."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.shared.served_process import ServedProcess

END_SECONDS = 60.0
POLL_SECONDS = 0.005
_TITLE = "inflight: "


class FaultServer(ServedProcess):
    """Unlike a `ServedProcess` it may end with any exit code, and no process of it is left afterwards.

    Args: those of `ServedProcess` except `stderr`.

    Attributes:
        log: (time, line) of each line of the log so far, on the clock `time.monotonic()`. A thread reads it.
        exit_code: once the context manager has ended.
    """

    def __init__(
        self,
        options: Mapping[str, Any],  # Any: as the option takes it
        environment: Mapping[str, str] | None = None,
        *,
        arguments: Sequence[str] = (),
        prefix: Sequence[str] = (),
        host: str = "127.0.0.1",
    ) -> None:
        self.log: list[tuple[float, str]] = []
        self.exit_code: int | None = None
        reading, writing = os.pipe()
        self._reader = threading.Thread(target=self._read_log, args=(reading,), daemon=True)
        self._reader.start()
        try:
            super().__init__(options, environment, arguments=arguments, prefix=prefix, host=host, stderr=writing)
        except BaseException:
            time.sleep(0.1)  # until the thread has read the last lines
            sys.stderr.write(self.text_of_log())
            raise
        finally:
            os.close(writing)

    def _read_log(self, reading: int) -> None:
        with open(reading, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self.log.append((time.monotonic(), line.rstrip("\n")))

    def text_of_log(self) -> str:
        return "".join(f"{line}\n" for _, line in self.log)

    def log_time_after(self, start: float) -> float | None:
        """Returns the time of the first line after `start`, or None if nothing was logged since then."""
        return next((seconds for seconds, _ in self.log if seconds > start), None)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def titles(self) -> dict[int, str]:
        """Returns the title of each living process below the server, by process id: "engine", "worker tp0 pp0", ..."""
        found = {}
        for pid in descendants(self.pid):
            with contextlib.suppress(OSError):  # it has just ended
                if _is_zombie(pid):
                    continue
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                found[pid] = next((word.removeprefix(_TITLE) for word in words if word.startswith(_TITLE)), "")
        return {pid: title for pid, title in found.items() if title}

    def anonymous_bytes(self) -> int:
        """The memory of all its processes without the pages of files and without shared memory."""
        return sum(_anonymous_bytes(pid) for pid in descendants(self.pid))

    def get(self, path: str) -> tuple[int, Any]:
        """Returns the status, and the JSON (or None) of the body; (0, None) if nobody answers."""
        connection = http.client.HTTPConnection(*self.address, timeout=10)
        with contextlib.closing(connection):
            try:
                connection.request("GET", path)
                response = connection.getresponse()
                body = response.read()
            except (OSError, http.client.HTTPException):
                return 0, None
        try:
            return response.status, json.loads(body)
        except ValueError:
            return response.status, None

    def fault_status(self) -> dict[str, Any]:
        """Returns the JSON of /fault_tolerance/status; empty if the server does not answer it."""
        status, body = self.get("/fault_tolerance/status")
        return body if status == 200 and isinstance(body, dict) else {}

    def num_recoveries(self) -> dict[str, int]:
        """Returns by cause how many recoveries the server has counted; causes without one are left out."""
        return {cause: count for cause, count in self.fault_status().get("num_recoveries", {}).items() if count}

    def wait_until_recovered(self, seconds: float, num_before: int = -1) -> bool:
        """Wait until the server has counted more than `num_before` recoveries, is ready, and no recovery is under way. Returns
        False if that takes too long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.has_ended:
            is_ready, state = self.get("/ready")[0] == 200, self.fault_status().get("state", "healthy")
            if is_ready and state == "healthy" and sum(self.num_recoveries().values()) > num_before:
                return True
            time.sleep(10 * POLL_SECONDS)
        return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pids = [*descendants(self.pid)]
        for pid in pids:  # a stopped process would not end
            _send(pid, signal.SIGCONT)
        self._process.terminate()
        end = time.monotonic() + END_SECONDS
        while self._process.poll() is None and time.monotonic() < end:
            time.sleep(10 * POLL_SECONDS)
        for pid in pids if self._process.poll() is not None else [*pids, *descendants(self.pid)]:
            if _is_ours(pid):
                _send(pid, signal.SIGKILL)
        self.exit_code = self._process.wait()
        self._reader.join(END_SECONDS)


def descendants(pid: int) -> list[int]:
    """Returns the process ids of all processes below `pid`, and of `pid`, but not those of fork servers: they belong to the
    way in which a process is started, and end with the process that uses them."""
    found = [] if is_fork_server(pid) else [pid]
    with contextlib.suppress(OSError):  # it has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has just ended
                for child in (task / "children").read_text().split():
                    found += descendants(int(child))
    return found


def is_fork_server(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"-m\0tests.support.fork_server\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _anonymous_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, StopIteration):  # it has just ended
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("RssAnon:")).split()[1])
    return 0


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _is_ours(pid: int) -> bool:
    """Whether the process is one of Inflight's, and not a process that got the same number later."""
    with contextlib.suppress(OSError):
        return b"inflight" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
