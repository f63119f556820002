"""A server whose log nobody reads: its stderr is a pipe that is full. It goes on, says that it lives, and ends in its time."""

from __future__ import annotations

import os
import signal
import sys
import time

import httpx

from benchmarks.shared.free_port import free_port
from tests.support.python_process import PythonProcess
from tests.support.waits import wait_until

_COMMAND = "import sys; from inflight.entrypoints.cli.main import main; sys.exit(main())"
BODY = {"prompt": "Once upon", "max_tokens": 2, "temperature": 0}


def fill(pipe: int) -> None:
    """Write until the pipe takes no more."""
    other = os.open(f"/proc/self/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        for size in (4096, 1):
            try:
                while True:
                    os.write(other, b"." * size)
            except BlockingIOError:
                pass
    finally:
        os.close(other)


def test_a_server_whose_log_nobody_reads() -> None:
    port = free_port()
    reader, writer = os.pipe()
    options = ["--dtype", "float32", "--num-threads", "1", "--access-log", "text"]
    options += ["--api-server-count", "2", "--tensor-parallel-size", "2"]  # every kind of process
    command = [sys.executable, "-c", _COMMAND, "serve", "--port", str(port), *options]
    server = PythonProcess(command, stdout=writer, stderr=writer)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:

        def is_ready() -> bool:
            try:
                return client.get("/ready").status_code == 200
            except httpx.TransportError:
                return False

        try:
            fill(writer)  # from its first line on
            wait_until(is_ready)
            first = client.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
            for number in range(100):  # each writes a line about a field that is ignored
                answer = client.post("/v1/completions", json={**BODY, f"unknown_{number}": 1})
                assert answer.json()["choices"][0]["text"] == first
            assert client.get("/live").status_code == 200
            server.send_signal(signal.SIGTERM)
            begin = time.monotonic()
            assert server.wait(300) == 0
            assert time.monotonic() - begin < 30, "far below the limit after which a shutdown that hangs is ended"
        finally:
            server.kill()
            server.wait()
            os.close(writer)
            os.close(reader)
