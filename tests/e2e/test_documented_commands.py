"""Every command in README.md and docs/ is run as the page has it, in order, page by page."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.documented_commands import (
    LANGUAGES,
    PAGES,
    ROOT,
    Block,
    blocks_of,
    commands_of,
    indented_commands,
    make_hub,
    make_workspace,
    port_of,
    serves,
    write_embedded_gguf,
    write_model_of_drawings,
)
from tests.support.fork_server import current_fork_server
from tests.support.python_commands import python_commands
from tests.support.python_process import shared_imports

# Repositories of the hub that the pages name; each holds the embedded model, as safetensors or in the GGUF files named.
HUB = {"Qwen/Qwen3-0.6B": [], "Qwen/Qwen3-0.6B-GGUF": ["Qwen3-0.6B-Q8_0.gguf"]}
SECONDS = 300.0
RUN = [(page, block) for page in PAGES for block in blocks_of(page) if block.language in ("sh", "python")]
PAGES_WITH_COMMANDS = [page for page in PAGES if any(each is page and not block.not_run for each, block in RUN)]


class Shell:
    """Runs a page's commands in one folder, and keeps at most one server for them."""

    def __init__(self, workspace: Path, environment: dict[str, str]) -> None:
        self._workspace = workspace
        self._environment = environment
        self._server: subprocess.Popen[bytes] | None = None
        self._log = workspace / "server.log"

    def run(self, command: str, where: str) -> None:
        if serves(command):
            self._serve(command, where)
            return
        self._check(["bash", "-c", command], f"{where}: {command}")

    def run_python(self, script: str, where: str) -> None:
        self._check(["python", "-c", script], where)

    def _check(self, arguments: list[str], what: str) -> None:
        done = subprocess.run(
            arguments,
            stdin=subprocess.DEVNULL,
            cwd=self._workspace,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        served = self._log.read_text() if self._log.exists() else ""
        assert done.returncode == 0, f"{what}\n{done.stdout}\n{done.stderr}\n{served[-3000:]}"

    def _serve(self, command: str, where: str) -> None:
        self.stop()
        port = port_of(command)
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                taken.bind(("127.0.0.1", port))
            except OSError:
                pytest.skip(f"port {port}, which {where} names, is in use on this machine")
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                ["bash", "-c", f"exec {command}"] if "=" not in command.split()[0] else ["bash", "-c", command],
                cwd=self._workspace,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        end = time.monotonic() + SECONDS
        while not self._is_ready(port):
            assert self._server.poll() is None, f"{where}: {command}\n{self._log.read_text()}"
            assert time.monotonic() < end, f"{where}: {command} is not ready\n{self._log.read_text()}"
            time.sleep(0.1)

    @staticmethod
    def _is_ready(port: int) -> bool:
        with contextlib.suppress(OSError, urllib.error.URLError):
            return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).status == 200)
        return False

    def stop(self) -> None:
        if self._server is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGTERM)
        try:
            self._server.wait(300)
        except subprocess.TimeoutExpired:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
        self._server = None


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedded_gguf(tmp_path_factory.mktemp("gguf") / "my-model.gguf")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, gguf: Path) -> Iterator[dict[str, str]]:
    """With the commands `inflight` and `python` of a fork server, which has imported libraries with this environment."""
    home = tmp_path_factory.mktemp("home")
    found = {name: value for name, value in os.environ.items() if not name.startswith(("INFLIGHT_", "OPENAI_"))}
    with python_commands() as programs:
        found |= {
            "PATH": f"{programs}:{Path(sys.executable).parent}:{found['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "no_proxy": "localhost,127.0.0.1",
        }
        make_hub(home / "hub", HUB, gguf)
        write_model_of_drawings(home / ".cache" / "inflight" / "drawings")
        with shared_imports(found):
            server = current_fork_server()
            assert server is not None and server.wait_until_ready(SECONDS)
            yield found


@pytest.fixture
def shell(
    tmp_path: Path, environment: dict[str, str], gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shell]:
    """One at a time on a machine: pages name ports."""
    with tmp_path_factory.getbasetemp().parent.joinpath("documented_commands.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shell = Shell(make_workspace(tmp_path, gguf), environment)
        yield shell
        shell.stop()


@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=lambda page: page.name)
def test_the_commands_of_a_page(page: Path, shell: Shell) -> None:
    for block in blocks_of(page):
        where = f"{block.page}:{block.line}"
        if block.not_run:
            continue
        if block.language == "python":
            shell.run_python(block.text, where)
        if block.language == "sh":
            for command in commands_of(block):
                shell.run(command, where)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_say_what_they_are(page: Path) -> None:
    """A block without a language, or an indented one, would hide its commands from the test above."""
    unknown = [f"{block.page}:{block.line}: {block.language!r}" for block in blocks_of(page)]
    assert [each for each, block in zip(unknown, blocks_of(page), strict=True) if block.language not in LANGUAGES] == []
    assert list(indented_commands(page)) == []


def test_few_blocks_are_not_run() -> None:
    left_out = [(f"{block.page}:{block.line}", block.not_run) for _, block in RUN if block.not_run]
    print(json.dumps(left_out, indent=1))
    assert len(left_out) <= len(RUN) / 4, left_out


def benchmark_commands() -> list[tuple[str, str, list[str]]]:
    """(where, module, arguments) of each `python -m benchmarks.x ...` in a page. What is in square brackets counts, too."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"`(?:[A-Z_]+=\S+ )*python -m (benchmarks\.[\w.]+)([^`]*)`", text):
            where = f"{page.name}:{text[: match.start()].count(chr(10)) + 1}"
            found.append((where, match.group(1), shlex.split(match.group(2).replace(" [", " ").replace("]", ""))))
    return found


class ReadArguments(Exception):
    """The arguments were read."""


@pytest.mark.parametrize(("where", "module", "arguments"), benchmark_commands())
def test_a_benchmark_takes_the_arguments(
    where: str, module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Benchmarks take minutes, and some need other engines: their arguments are read, and nothing more."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *given: object) -> None:
        parse(self, *given)  # type: ignore[call-overload]
        raise ReadArguments

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    is_package = importlib.util.find_spec(module).submodule_search_locations is not None  # type: ignore[union-attr]
    with pytest.raises(ReadArguments):
        importlib.import_module(f"{module}.__main__" if is_package else module).main()


def test_commands_are_cut_where_bash_would() -> None:
    text = "a b \\\n  c\n\nd 'e\nf'  # g\ncat > x <<'E'\nline\nE\n"
    assert commands_of(Block("x.md", 1, "sh", text)) == ["a b \\\n  c", "d 'e\nf'  # g", "cat > x <<'E'\nline\nE"]
    assert serves("inflight serve ./my-model --port 9000")
    assert serves("A=b inflight serve")
    assert not serves("inflight serve --config serve.yaml --check")
    assert port_of("inflight serve --port 9000") == 9000


def test_a_reason_is_read(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run: needs a GPU -->\n```sh\na\n```\n\n<!-- run by tests/x.py -->\n```sh\nb\n```\n\n```python\nc\n```\n"
    )
    assert [(each.not_run, each.text) for each in blocks_of(page)] == [
        ("needs a GPU", "a\n"),
        ("tests/x.py", "b\n"),
        ("", "c\n"),
    ]
