"""`inflight launch` before a server that runs, with programs that stand for the agents. tests/e2e/test_launch.py starts one."""

from __future__ import annotations

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from inflight.entrypoints.cli.agents import AGENTS, FOLDER, Target
from inflight.entrypoints.cli.launch import SHORT_CONTEXT, _signals
from tests.support.waits import wait_until
from tests.unit.entrypoints.cli.test_models import _Server, address
from tests.unit.entrypoints.runner import invoke

__all__ = ["address"]  # a fixture

TARGET = Target("http://127.0.0.1:8000", "org/name", 32768, "a-key")
# what a program that stands for an agent does: it writes what it was given, and ends with this code
AGENT = """\
#!{python}
import json, os, pathlib, signal, sys, time
folder = os.environ.get("PI_CODING_AGENT_DIR", "")
files = {{each.name: each.read_text() for each in pathlib.Path(folder).iterdir()}} if folder else {{}}
given = {{"arguments": sys.argv[1:], "variables": dict(os.environ), "files": files}}
if "wait" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    signal.signal(signal.SIGINT, lambda *_: None)
pathlib.Path({seen!r}).write_text(json.dumps(given))
while "wait" in sys.argv:
    time.sleep(0.05)
if "die" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(5)
"""


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a program writes what it was given. All agents are such programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    found = tmp_path / "seen.json"
    for agent in AGENTS.values():
        program = folder / agent.program
        program.write_text(AGENT.format(python=sys.executable, seen=str(found)))
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("OPENAI_API_KEY", "INFLIGHT_API_KEY", "VLLM_API_KEY", "INFLIGHT_SERVE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, address: str) -> str:
    models = {"data": [{"id": "org/name", "max_model_len": 32768}]}
    monkeypatch.setattr(_Server, "answers", {"/v1/models": (200, models), "/ready": (200, {})})
    monkeypatch.setattr(_Server, "keys", [])
    return address


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_gets_the_address_the_model_and_its_arguments(name: str, served: str, seen: Path) -> None:
    done = invoke(["launch", name, "--url", f"{served}/v1", "--", "-p", "say hi"])
    assert done.exit_code == 5, done.output
    given = json.loads(seen.read_text())
    assert given["arguments"][-2:] == ["-p", "say hi"]
    whole = json.dumps(given)
    assert served in whole and "org/name" in whole
    expected = AGENTS[name].make(Target(served, "org/name", 32768))
    assert given["arguments"][:-2] == list(expected.options)
    for variable, value in expected.variables.items():
        shown = given["variables"].get(variable)
        assert shown == value or (value == FOLDER and not Path(shown).exists())
    assert given["files"] == expected.files


def test_what_would_send_requests_elsewhere_is_removed(
    served: str, seen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK"):
        monkeypatch.setenv(name, "x")
    invoke(["launch", "claude", "--url", served])
    variables = json.loads(seen.read_text())["variables"]
    assert "ANTHROPIC_API_KEY" not in variables and "CLAUDE_CODE_USE_BEDROCK" not in variables
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "32768"


def test_the_users_own_files_are_there_and_unchanged(served: str, seen: Path) -> None:
    own = Path("~/.pi/agent").expanduser()
    own.mkdir(parents=True)
    (own / "settings.json").write_text("own")
    (own / "models.json").write_text("own")
    invoke(["launch", "pi", "--url", served])
    files = json.loads(seen.read_text())["files"]
    assert files["settings.json"] == "own" and "org/name" in files["models.json"]
    assert sorted(each.name for each in own.iterdir()) == ["models.json", "settings.json"]
    assert (own / "models.json").read_text() == "own"


def test_an_agent_that_is_killed_by_a_signal(served: str, seen: Path) -> None:
    assert invoke(["launch", "claude", "--url", served, "--", "die"]).exit_code == 128 + signal.SIGKILL


def test_signals_reach_the_agent(served: str, seen: Path) -> None:
    script = "import sys; from inflight.entrypoints.cli.main import main; sys.argv[0] = 'inflight'; main()"
    command = [sys.executable, "-c", script, "launch", "claude", "--url", served, "--", "wait"]
    process = subprocess.Popen(command)
    wait_until(seen.exists)
    process.send_signal(signal.SIGINT)  # the agent's own: from a terminal it would get it, too
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 7


def test_a_signal_that_comes_while_the_agent_is_started_reaches_it_too() -> None:
    with _signals() as forward_to:
        os.kill(os.getpid(), signal.SIGTERM)
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) as program:
            forward_to(program)
            assert program.wait(60) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["launch", "emacs"], 2, "give one of claude, codex"),
        (["launch", "claude", "--url", "localhost"], 2, "is no address of a server"),
        (["launch", "claude", "--url", "http://127.0.0.1:1"], 2, "give the model with --model"),
        (
            ["launch", "claude", "--url", "https://127.0.0.1:1", "--model", "m"],
            2,
            "can be started only at an address like",
        ),
        (["launch", "claude", "--url", "http://127.0.0.1:1", "--print-env"], 1, "no server answers"),
    ],
)
def test_what_is_refused(seen: Path, arguments: list[str], code: int, says: str) -> None:
    done = invoke(arguments)
    assert (done.exit_code, says in done.stderr) == (code, True), done.stderr
    assert not seen.exists()


def test_a_program_that_is_not_installed(served: str, seen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(seen.parent))
    done = invoke(["launch", "codex", "--url", served])
    assert done.exit_code == 2 and "install it with: npm install -g @openai/codex" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_model_is_one_of_the_servers(served: str, seen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = invoke(["launch", "claude", "--url", served, "-m", "other"])
    assert done.exit_code == 2 and "serves org/name, not other" in done.stderr
    two = {"data": [{"id": "a", "max_model_len": 4096}, {"id": "b"}]}
    monkeypatch.setitem(_Server.answers, "/v1/models", (200, two))
    done = invoke(["launch", "claude", "--url", served])
    assert done.exit_code == 2 and "serves a, b: give one with --model" in done.stderr
    assert not seen.exists()
    done = invoke(["launch", "claude", "--url", served, "-m", "a"])
    assert done.exit_code == 5 and "4096 tokens, which is short" in done.stderr and SHORT_CONTEXT > 4096
    assert invoke(["launch", "claude", "--url", served, "-m", "b"]).exit_code == 5
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS" not in json.loads(seen.read_text())["variables"]


def test_the_key_of_the_server(served: str, seen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-another")
    invoke(["launch", "claude", "--url", served])
    assert json.loads(seen.read_text())["variables"]["ANTHROPIC_AUTH_TOKEN"] == "none"
    assert set(_Server.keys) == {None}  # a server that needs no key does not get this one
    monkeypatch.setenv("INFLIGHT_API_KEY", "of-the-server")
    invoke(["launch", "claude", "--url", served])
    assert json.loads(seen.read_text())["variables"]["ANTHROPIC_AUTH_TOKEN"] == "of-the-server"
    monkeypatch.setitem(_Server.answers, "/v1/models", (401, {}))
    done = invoke(["launch", "claude", "--url", served])
    assert done.exit_code == 2 and "wants an API key" in done.stderr
    assert _Server.keys[-1] == "Bearer of-another"


@pytest.mark.parametrize("name", AGENTS)
def test_the_printed_lines_do_the_same_in_a_shell(name: str, served: str, seen: Path) -> None:
    printed = invoke(["launch", name, "--url", served, "--print-env", "--", "-p", "it's"])
    assert printed.exit_code == 0 and not seen.exists()
    subprocess.run(["sh", "-c", printed.stdout], check=False, env=dict(os.environ))
    by_hand: Any = json.loads(seen.read_text())
    invoke(["launch", name, "--url", served, "--", "-p", "it's"])
    launched: Any = json.loads(seen.read_text())
    changing = {"PI_CODING_AGENT_DIR", "_", "SHLVL", "PWD", "OLDPWD", "PYTEST_CURRENT_TEST"}
    for each in (by_hand, launched):
        each["variables"] = {key: value for key, value in each["variables"].items() if key not in changing}
    assert by_hand == launched


def test_without_a_server_the_lines_are_those_of_the_given_model(seen: Path) -> None:
    done = invoke(["launch", "codex", "--url", "http://127.0.0.1:1", "-m", "org/name", "--print-env"])
    assert done.exit_code == 0 and shlex.split(done.stdout.splitlines()[-1])[:3] == ["codex", "-c", 'model="org/name"']
    assert "model_context_window" not in done.stdout


def test_only_the_user_can_read_a_file_with_the_key(tmp_path: Path, seen: Path) -> None:
    printed = invoke(["launch", "pi", "--url", "http://127.0.0.1:1", "-m", "m", "--print-env"])
    home = tmp_path / "home"
    subprocess.run(["sh", "-c", printed.stdout], check=False, env={**os.environ, "HOME": str(home)})
    (written,) = home.rglob("models.json")
    assert stat.S_IMODE(written.stat().st_mode) == 0o600


def test_the_values_are_toml() -> None:
    options = AGENTS["codex"].make(TARGET).options
    read = tomllib.loads("\n".join(options[1::2]))
    assert read["model"] == "org/name" and read["model_context_window"] == 32768
    assert read["model_providers"]["inflight"]["base_url"] == "http://127.0.0.1:8000/v1"
