"""`inflight serve` as a process of its own, seen from outside: its answers, its children, its exit code, what it leaves."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.robustness.fault_server import descendants
from benchmarks.shared.free_port import free_port
from inflight import envs
from tests.support.python_process import PythonProcess

REPOSITORY = Path(__file__).parents[2]
MODEL = "tested"
SECONDS = 300.0


class ServeProcess:
    """
    Args:
        options: of `inflight serve`.
        installed: the `inflight` of another environment; without it the sources of this repository run.
        has_name: whether the model is served as `MODEL`.
        variables: of the environment.
    """

    def __init__(
        self, *options: str, tls: Any = None, installed: Path | None = None, has_name: bool = True, **variables: str
    ) -> None:
        self.port = free_port()
        self.tls = tls
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `serving`
        environment = {name: value for name, value in os.environ.items() if not name.startswith("INFLIGHT_SERVE_")}
        for name in envs.API_KEY_VARIABLES:
            environment.pop(name, None)
        script = "import sys; from inflight.entrypoints.cli.main import main; sys.argv[0] = 'inflight'; main()"
        command = [sys.executable, "-c", script] if installed is None else [str(installed)]
        path = {"PYTHONPATH": str(REPOSITORY)} if installed is None else {}
        fixed = ["--port", str(self.port), "--access-log", "off"]
        fixed += ["--served-model-name", MODEL] if has_name else []
        start = PythonProcess if installed is None else subprocess.Popen
        self.popen = start(
            [*command, "serve", *fixed, *options],
            stdout=self.log,
            stderr=self.log,
            cwd=REPOSITORY if installed is None else installed.parent,
            env={**environment, **path, "OMP_NUM_THREADS": "1", **variables},
        )

    def text_of_log(self) -> str:
        number = self.log.fileno()
        # without a change of the offset: the server's processes write at the same one
        return os.pread(number, os.fstat(number).st_size, 0).decode(errors="replace")

    def connect(self) -> http.client.HTTPConnection:
        if self.tls is not None:
            return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=SECONDS, context=self.tls)
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)

    def request(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, str]:
        with contextlib.closing(self.connect()) as connection:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return response.status, response.read().decode()

    def wait_until(self, path: str, status: int) -> str:
        end = time.monotonic() + SECONDS
        found: object = None
        while time.monotonic() < end:
            assert self.popen.poll() is None, self.text_of_log()
            with contextlib.suppress(OSError, http.client.HTTPException):
                found = self.request("GET", path)
                if found[0] == status:
                    return found[1]
            time.sleep(0.02)
        raise AssertionError(f"{path} did not become {status}: {found}; {self.text_of_log()}")

    def wait_for_child(self, title: str) -> int:
        end = time.monotonic() + SECONDS
        while (found := self.children().get(title)) is None:
            assert time.monotonic() < end, self.text_of_log()
            time.sleep(0.01)
        return found

    def start_stream(self, max_tokens: int, headers: dict[str, str] | None = None) -> Stream:
        return Stream(self.connect(), max_tokens, headers or {})

    def children(self) -> dict[str, int]:
        """By title: engine, front end 0, ..."""
        found = {}
        for child in tree_of(self.popen.pid):
            try:
                words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
            except OSError:  # it has ended since
                continue
            title = next((word for word in words if word.startswith("inflight: ")), "")
            found[title.removeprefix("inflight: ")] = child
        return found

    def end(self, seconds: float = SECONDS) -> int:
        return self.popen.wait(seconds)

    def end_and_leave_nothing(self) -> None:
        """Ask the server to end, and check that it does, and that nothing of it is left."""
        pids = tree_of(self.popen.pid)
        shared = shared_memory_of(pids)
        self.popen.send_signal(signal.SIGTERM)
        assert self.end() == 0, self.text_of_log()
        assert_nothing_left(pids, shared)


class Stream:
    """A streamed completion whose first event has come."""

    def __init__(
        self, connection: http.client.HTTPConnection, max_tokens: int, headers: dict[str, str] | None = None
    ) -> None:
        self.connection = connection
        body = {
            "model": MODEL,
            "prompt": "Once upon",
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "seed": 0,
            "stream": True,
        }
        usage = {"stream_options": {"include_usage": True}}
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps({**body, **usage}),
            {"Content-Type": "application/json", **(headers or {})},
        )
        assert connection.sock is not None
        self.port = int(connection.sock.getsockname()[1])
        self._response = connection.getresponse()
        assert self._response.status == 200
        self._first = b":"
        while self._first.startswith((b":", b"\n")):  # comments keep the connection of a stream that waits
            self._first = self._response.readline()

    def rest(self) -> str:
        """All events, as text. A connection that was cut ends them."""
        try:
            return (self._first + self._response.read()).decode()
        except http.client.IncompleteRead as error:
            return (self._first + error.partial).decode()
        except OSError:
            return self._first.decode()
        finally:
            self.connection.close()


def events_of(text: str) -> list[Any]:
    """The JSON of all events, without comments; the last is "[DONE]", which is left out."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line and not line.startswith(":")]
    assert lines[-1] == "[DONE]", text[-500:]
    return [json.loads(line) for line in lines[:-1]]


def tree_of(pid: int) -> set[int]:
    """The process and all that descend from it."""
    return set(descendants(pid))


def shared_memory_of(pids: set[int]) -> set[str]:
    """Entries of /dev/shm that they have mapped."""
    lines = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            lines += Path(f"/proc/{pid}/maps").read_text().split("\n")
    return {line.split()[5] for line in lines if "/dev/shm/" in line}


def assert_nothing_left(pids: set[int], shared: set[str], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while left := {pid for pid in pids if Path(f"/proc/{pid}").exists()}:
        assert time.monotonic() < end, f"processes are left: {left}"
        time.sleep(0.02)
    assert not [path for path in shared if Path(path).exists()]
    # Other processes have names there, too: with numbers that are longer, or by chance.
    names = re.compile(rf"(?<![0-9a-zA-Z])({'|'.join(map(str, pids))})(?![0-9a-zA-Z])")
    assert not [path for path in Path("/dev/shm").glob("*") if names.search(path.name)]


@contextlib.contextmanager
def serving(*options: str, ready: bool = True, **more: Any) -> Iterator[ServeProcess]:
    server = ServeProcess(*options, **more)
    try:
        if ready:
            server.wait_until("/ready", 200)
        yield server
    finally:
        if server.popen.poll() is None:
            for pid in tree_of(server.popen.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        server.popen.wait()
        server.log.close()
