"""`ServedProcess`: a real `inflight serve` for a benchmark, and what its processes use."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from benchmarks.shared.free_port import free_port

START_SECONDS = 300.0
_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")


class ServedProcess:
    """Ready when it is made; a context manager that ends it by SIGTERM.

    Args:
        options: of `inflight serve`, by the names of `EngineArgs` and `ServerSettings`.
        environment: more variables.
        arguments: further arguments of `inflight serve`, as a user writes them.
        prefix: a command that runs the server, such as `ip netns exec NAME`.
        host: the address at which the server listens.
        stderr: descriptor of the file or pipe that gets the log; None: the log goes where this process's log goes.

    Attributes:
        command: the program, which gets the arguments of `inflight`.
        popen: the class that starts the process: `subprocess.Popen`. Some tests replace it, so that processes share their
            imports. Then the engine is the child of another process.
        address: host and port.
        port: at `host`.
        pid: of the front end or, with several front ends, of their supervisor; the engine is its child.
        cold_start_seconds: from the start of the process until `/ready` has answered 200.
    """

    popen: ClassVar[type[subprocess.Popen[Any]]] = subprocess.Popen
    command: ClassVar[str] = "from inflight.entrypoints.cli.main import main; main()"

    def __init__(
        self,
        options: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,  # Any: as the option takes it
        *,
        arguments: Sequence[str] = (),
        prefix: Sequence[str] = (),
        host: str = "127.0.0.1",
        stderr: int | None = None,
    ) -> None:
        self.port = free_port()
        self.address = host, self.port
        given = {"access_log": "off", "host": host, "port": self.port, **options}
        all_arguments = [*(text for name, value in given.items() for text in _as_option(name, value)), *arguments]
        more = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "INFLIGHT_LOG_LEVEL": "WARNING"}
        start = time.monotonic()
        self._process = self.popen(
            [*prefix, sys.executable, "-c", self.command, "serve", *all_arguments],
            env={**os.environ, **more, **(environment or {})},
            stderr=stderr,
        )
        self.pid = self._process.pid
        try:
            self._begun()
            self._wait_until_ready()
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        self.cold_start_seconds = time.monotonic() - start

    def _begun(self) -> None:
        """Called when the process runs, before it is ready."""

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            connection = http.client.HTTPConnection(*self.address, timeout=30)
            try:
                connection.request("GET", "/ready")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.02)
        raise SystemExit(f"inflight serve {'ended' if self._process.poll() is not None else 'does not get ready'}")

    @property
    def processes(self) -> dict[int, str]:
        """Process id -> name of the front end and all processes below it. The second of a name has its id behind the name."""
        found, parents = {self.pid: "front end"}, [self.pid]
        while parents:
            for task in Path(f"/proc/{parents.pop()}/task").glob("*/children"):
                for child in map(int, task.read_text().split()):
                    name = Path(f"/proc/{child}/comm").read_text().strip()
                    found[child] = f"{name} {child}" if name in found.values() else name
                    parents.append(child)
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


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_SECONDS


def _memory_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmRSS":
            return int(value.split()[0]) * 1024
    return 0  # it has just ended
