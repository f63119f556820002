"""`inflight launch` starts a server, waits for it, runs a program that stands for an agent, and ends the server."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.robustness.fault_server import descendants
from benchmarks.shared.free_port import free_port
from inflight.hub import EMBEDDED_MODEL
from tests.e2e.serve_process import REPOSITORY, serving
from tests.support.python_process import PythonProcess
from tests.support.waits import wait_until

SCRIPT = "import sys; from inflight.entrypoints.cli.main import main; sys.argv[0] = 'inflight'; main()"
AGENT = """\
#!{python}
import json, os, pathlib, sys, time, urllib.request
url, model = os.environ["ANTHROPIC_BASE_URL"], os.environ["ANTHROPIC_MODEL"]
body = {{"model": model, "max_tokens": 16, "temperature": 0, "messages": [{{"role": "user", "content": "What is 2 + 3?"}}]}}
request = urllib.request.Request(url + "/v1/messages", json.dumps(body).encode(), {{"content-type": "application/json"}})
answer = urllib.request.urlopen(request).read().decode()
path = pathlib.Path({seen!r})
path.with_suffix(".part").write_text(answer)
path.with_suffix(".part").rename(path)
while "wait" in sys.argv:
    time.sleep(0.05)
sys.exit(3)
"""


class Launched:
    def __init__(self, tmp_path: Path, *arguments: str, port: int | None = None) -> None:
        self.seen = tmp_path / "seen.json"
        self.port = port or free_port()
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "claude").write_text(AGENT.format(python=sys.executable, seen=str(self.seen)))
        (folder / "claude").chmod(0o755)
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
        environment["OMP_NUM_THREADS"] = "1"
        fixed = ["launch", "claude", "--url", f"http://127.0.0.1:{self.port}"]
        self.log = tmp_path / "log"
        with self.log.open("w") as log:
            command = [sys.executable, "-c", SCRIPT, *fixed, *arguments]
            self.popen = PythonProcess(command, stdout=log, stderr=log, cwd=REPOSITORY, env=environment)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/live", timeout=5):
                return True
        except OSError:
            return False


Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts the command, and kills it after the test; with it its server and its agent end."""
    made: list[Launched] = []

    def start(*arguments: str, port: int | None = None) -> Launched:
        made.append(Launched(tmp_path, *arguments, port=port))
        return made[-1]

    yield start
    for launched in made:
        launched.popen.kill()
        launched.popen.wait()


def text_of(seen: Path) -> str:
    answer: Any = json.loads(seen.read_text())
    return str(answer["content"][0]["text"])


def test_a_server_is_started_and_ended_with_its_agent(launch: Launch) -> None:
    launched = launch("--model", str(EMBEDDED_MODEL), "--", "wait")
    wait_until(launched.seen.exists)
    assert "5" in text_of(launched.seen)
    pids = descendants(launched.popen.pid)
    assert launched.answers() and len(pids) >= 3  # the agent, the server and its engine
    launched.popen.send_signal(signal.SIGTERM)
    assert launched.popen.wait(300) == 128 + signal.SIGTERM, launched.log.read_text()
    assert not launched.answers()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_the_server_and_the_agent_end_even_if_the_command_is_killed(launch: Launch) -> None:
    launched = launch("--model", str(EMBEDDED_MODEL), "--", "wait")
    wait_until(launched.seen.exists)
    pids = descendants(launched.popen.pid)
    assert len(pids) >= 3
    launched.popen.kill()
    launched.popen.wait()
    wait_until(lambda: not launched.answers())
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_a_server_that_has_died_is_told_when_the_agent_has_ended(launch: Launch) -> None:
    launched = launch("--model", str(EMBEDDED_MODEL), "--", "wait")
    wait_until(launched.seen.exists)
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in descendants(launched.popen.pid)}
    server = next(pid for pid, each in words.items() if b"serve" in each)
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{server}").exists() or not launched.answers())
    assert "before claude" not in launched.log.read_text()
    launched.popen.send_signal(signal.SIGTERM)
    assert launched.popen.wait(300) == 128 + signal.SIGTERM
    assert "warning: the server was killed before claude, with exit code -9" in launched.log.read_text()


def test_a_server_that_runs_is_used_and_goes_on(launch: Launch) -> None:
    with serving() as server:
        server.wait_until("/ready", 200)
        launched = launch(port=server.port)
        assert launched.popen.wait(300) == 3, launched.log.read_text()
        assert "5" in text_of(launched.seen)
        assert server.request("GET", "/health")[0] == 200


def test_a_server_that_cannot_start_says_why(launch: Launch, tmp_path: Path) -> None:
    launched = launch("--model", str(tmp_path / "absent"))
    assert launched.popen.wait(300) == 1
    text = launched.log.read_text()
    assert "the server could not start" in text and "absent" in text and "Traceback" not in text
    assert not launched.seen.exists()
