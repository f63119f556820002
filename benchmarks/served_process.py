"""`ServedProcess`: a real `inflight serve` for a benchmark, and what its processes use."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

START_SECONDS = 120.0
_COMMAND = "from inflight.entrypoints.cli.main import main; main()"
_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")


class ServedProcess:
    """Ready when it is made; a context manager that ends it by SIGTERM.

    Args:
        options: of `inflight serve`, by the names of `EngineArgs` and `ServerSettings`.
        environment: more variables.

    Attributes:
        port: on 127.0.0.1.
        pid: of the front end; the engine is its child.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,  # Any: as the option takes it
    ) -> None:
        self.port = _free_port()
        given = {"access_log": "off", "port": self.port, **options}
        arguments = [text for name, value in given.items() for text in _as_option(name, value)]
        more = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "INFLIGHT_LOG_LEVEL": "WARNING"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, "serve", *arguments], env={**os.environ, **more, **(environment or {})}
        )
        self.pid = self._process.pid
        try:
            self._wait_until_ready()
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
            try:
                connection.request("GET", "/ready")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.1)
        raise SystemExit(f"inflight serve {'ended' if self._process.poll() is not None else 'does not get ready'}")

    @property
    def processes(self) -> dict[int, str]:
        """Process id -> name of the front end and all processes below it."""
        found = {self.pid: "front end"}
        for parent in [self.pid]:
            for task in Path(f"/proc/{parent}/task").iterdir():
                for child in map(int, (task / "children").read_text().split()):
                    found[child] = Path(f"/proc/{child}/comm").read_text().strip()
        return found

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time so far, by the names of `processes`."""
        return {name: _cpu_seconds(pid) for pid, name in self.processes.items()}

    def memory_bytes(self) -> dict[str, int]:
        """Resident memory, by the names of `processes`."""
        return {name: _memory_bytes(pid) for pid, name in self.processes.items()}

    def stop_front_end(self) -> None:
        """As if it hung: it does nothing until `continue_front_end`."""
        os.kill(self.pid, signal.SIGSTOP)

    def continue_front_end(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            code = self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code and error is None:
            raise SystemExit(f"inflight serve ended with exit code {code}")


def _as_option(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)] if name != "model" else [str(value)]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_SECONDS


def _memory_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmRSS":
            return int(value.split()[0]) * 1024
    return 0  # it has just ended
