"""`inflight launch`: runs a coding agent with a model, and a server for it, if none runs."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TextIO
from urllib.parse import urlsplit

import typer

from inflight import envs
from inflight.entrypoints.cli.agents import AGENTS, FOLDER, Agent, Setting, Target
from inflight.entrypoints.cli.command import command, tell
from inflight.entrypoints.cli.conversation import API_KEY_VARIABLE, LOCAL_SERVER
from inflight.entrypoints.cli.models import NoServerError, WrongKeyError, served_models
from inflight.errors import ConfigError, EngineError
from inflight.processes.parent import die_with_parent

SHORT_CONTEXT = 16_384  # tokens; the first request of an agent has 10,000 to 30,000
READY = "ready"
_LOOK_SECONDS = 0.2  # between two looks whether the server is ready
_END_SECONDS = 60.0  # for the server to end, after its requests have ended or were cut
_LAST_LINES = 20  # of the server's log that are shown if it cannot start
_FORWARDED = (signal.SIGTERM, signal.SIGHUP)
_OF_THE_TERMINAL = (signal.SIGINT, signal.SIGQUIT)  # the terminal sends them to the agent, too

# The server is killed with this command, so nothing is left of it even if the command is killed.
_SERVE = """
import sys
from inflight.processes.parent import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
from inflight.entrypoints.cli.main import main
sys.argv[0] = "inflight"
main()
"""

EPILOG = f"""\b
Examples:
  inflight launch claude --model Qwen/Qwen3-8B
  inflight launch codex --model ./my-model -- exec "Explain this repository."
  inflight launch opencode --print-env

What comes behind -- goes to the agent. Agents: {", ".join(AGENTS)}.
Options of the server that is started are in the environment: INFLIGHT_SERVE_MAX_MODEL_LEN=32768. docs/agents.md has more.
"""


@command
def launch(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help=f"One of {', '.join(AGENTS)}.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="Arguments of the agent.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", metavar="MODEL", help="A folder, a GGUF file, or a hub id; or a name that the server has."
        ),
    ] = None,
    url: Annotated[
        str, typer.Option(metavar="URL", help="The server; it is started if none runs there.")
    ] = LOCAL_SERVER,
    print_env: Annotated[
        bool, typer.Option("--print-env", help="Only show the variables and the command, and start nothing.")
    ] = False,
) -> None:
    """Run a coding agent with a model of yours."""
    found = AGENTS.get(agent)
    if found is None:
        raise ConfigError(f"{agent!r} is no agent that is known here; give one of {', '.join(AGENTS)}")
    url = url.rstrip("/").removesuffix("/v1")
    if print_env:
        return _print(found, _known_target(url, model), arguments or [])
    if shutil.which(found.program) is None:
        raise ConfigError(f"{found.program} is not installed, or not in PATH; install it with: {found.install}")
    with _server(url, model, found.program) as target:
        code = _run(found, target, arguments or [])
    raise typer.Exit(code)


def _known_target(url: str, model: str | None) -> Target:
    """What is known without starting a server."""
    try:
        return _target(url, model)
    except NoServerError:
        if model is None:
            raise
        return Target(url, model, None, _key())


def _key() -> str | None:
    return next((os.environ[name] for name in envs.API_KEY_VARIABLES if os.environ.get(name)), None)


def _target(url: str, model: str | None) -> Target:
    """The model of the server that runs at this address.

    Raises:
        NoServerError: none runs there.
        ConfigError: it does not serve the model, or wants another key.
    """
    key = _key()
    try:
        served = served_models(url, key)
    except WrongKeyError:
        key = os.environ.get(API_KEY_VARIABLE)
        if not key:
            raise
        served = served_models(url, key)
    names = [each["model"] for each in served]
    if model is None:
        if len(names) != 1:
            raise ConfigError(f"{url} serves {', '.join(names) or 'no model'}: give one with --model")
        model = names[0]
    chosen = next((each for each in served if each["model"] == model), None)
    if chosen is None:
        raise ConfigError(f"{url} serves {', '.join(names) or 'no model'}, not {model}; give another --model, or --url")
    return Target(url, chosen["model"], chosen["max_model_len"], key)


@contextlib.contextmanager
def _server(url: str, model: str | None, agent: str) -> Iterator[Target]:
    """Use the server at this address. If none runs there, start one, and end it afterwards.

    Raises:
        ConfigError: see `_target`; or no server runs, and there is no model to start one with.
        EngineError: the server does not start.
    """
    try:
        target = _target(url, model)
    except NoServerError as error:
        if model is None:
            raise ConfigError(f"no server runs at {url}: give the model with --model, and it is started") from error
        with _started(url, model, agent) as target:
            yield target
        return
    _wait_until_ready(target, None)
    yield target


@contextlib.contextmanager
def _started(url: str, model: str, agent: str) -> Iterator[Target]:
    address = urlsplit(url)
    if address.scheme != "http" or address.path or address.hostname is None:
        raise ConfigError(f"no server runs at {url}, and one can be started only at an address like {LOCAL_SERVER}")
    host = "127.0.0.1" if address.hostname == "localhost" else address.hostname
    place = ["--host", host, "--port", str(address.port or 80)]
    command = [sys.executable, "-c", _SERVE, str(os.getpid()), "serve", model, *place, "--access-log", "off"]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        # in a session of its own, so that Ctrl-C in the agent does not end it
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait_until_listening(url, server, log)
            target = _target(url, None)
            _wait_until_ready(target, (server, log))
            yield target
            if server.poll() is not None:  # told only now, because the agent has used the terminal until now
                _show_end(log)
                how = "the server has ended" if server.returncode >= 0 else "the server was killed"
                tell(
                    "warning", f"{how} before {agent}, with exit code {server.returncode}; the end of its log is above"
                )
        finally:
            _end(server)


def _wait_until_listening(url: str, server: "subprocess.Popen[bytes]", log: TextIO) -> None:
    with _progress(f"starting the server at {url}") as show:
        while True:
            _check_alive(server, log)
            show()
            try:
                served_models(url, _key())
                return
            except (NoServerError, EngineError):  # it does not listen yet, or is not ready yet
                time.sleep(_LOOK_SECONDS)


def _wait_until_ready(target: Target, own: "tuple[subprocess.Popen[bytes], TextIO] | None") -> None:
    with _progress(f"waiting until {target.model} is ready") as show:
        while True:
            if own is not None:
                _check_alive(*own)
            state = served_models(target.url, target.key)[0]["state"]
            if state in (READY, "serving"):
                return
            show()
            time.sleep(_LOOK_SECONDS)


def _check_alive(server: "subprocess.Popen[bytes]", log: TextIO) -> None:
    """
    Raises:
        EngineError: the server has ended. The end of its log is shown first.
    """
    if server.poll() is None:
        return
    _show_end(log)
    raise EngineError("the server could not start; the end of its log is above")


def _show_end(log: TextIO) -> None:
    log.seek(0)
    for line in log.read().splitlines()[-_LAST_LINES:]:
        typer.echo(line, err=True)


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Any]:  # Any: a function without arguments
    """Shows on a terminal what is waited for, and for how long."""
    begun = time.monotonic()
    is_shown = sys.stderr.isatty()

    def show() -> None:
        if is_shown:
            sys.stderr.write(f"\r{what}: {time.monotonic() - begun:.0f} s ")
            sys.stderr.flush()

    try:
        yield show
    finally:
        if is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _end(server: "subprocess.Popen[bytes]") -> None:
    """End the server. The agent has ended, so nobody waits for its requests: the second signal cuts them."""
    for _ in range(2):
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(1.0)
    try:
        server.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _run(agent: Agent, target: Target, arguments: list[str]) -> int:
    """Run the agent in this terminal. Returns its exit code, as a shell shows it."""
    if target.context is not None and target.context < SHORT_CONTEXT:
        tell("note", f"{target.model} has a context of {target.context} tokens, which is short for an agent")
    setting = agent.make(target)
    with _folder(setting) as setting:
        environment = {**os.environ, **{name: value for name, value in setting.variables.items() if value is not None}}
        for name, value in setting.variables.items():
            if value is None:
                environment.pop(name, None)
        with _signals() as forward_to:
            # If this command is killed, the server is gone, and the agent would share the terminal with the shell. It is asked
            # to end, so that it can give back the terminal as it was.
            ask_to_end = partial(die_with_parent, os.getpid(), signal.SIGTERM)
            command = [agent.program, *setting.options, *arguments]
            program = subprocess.Popen(command, env=environment, preexec_fn=ask_to_end)  # this process has one thread
            forward_to(program)
            code = _wait_for_end(program)
    return 128 - code if code < 0 else code


def _wait_for_end(program: "subprocess.Popen[bytes]") -> int:
    """Returns the exit code. Python handles a signal that comes just before a wait begins only after this wait. So each wait is
    short."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return program.wait(_LOOK_SECONDS)


@contextlib.contextmanager
def _signals() -> Iterator["Callable[[subprocess.Popen[bytes]], None]"]:
    """The agent gets the signals that ask this process to end, also those that come while it is started. Ctrl-C is the
    agent's own. Yields a function that is called with the agent as soon as it runs."""
    children: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        if not children:
            early.append(number)
        for child in children:
            child.send_signal(number)

    def forward_to(child: "subprocess.Popen[bytes]") -> None:
        children.append(child)
        for number in early:
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    before |= {number: signal.signal(number, lambda *_: None) for number in _OF_THE_TERMINAL}
    try:
        yield forward_to
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _folder(setting: Setting) -> Iterator[Setting]:
    """The setting with its files in a folder, which is removed afterwards."""
    if not setting.files:
        yield setting
        return
    with tempfile.TemporaryDirectory(prefix="inflight-launch-") as folder:
        if setting.beside is not None and setting.beside.is_dir():
            for each in setting.beside.iterdir():
                if each.name not in setting.files:
                    Path(folder, each.name).symlink_to(each)
        for name, text in setting.files.items():
            Path(folder, name).write_text(text, "utf-8")
        yield replace(setting, variables=_with_folder(setting.variables, folder))


def _with_folder(variables: Mapping[str, str | None], folder: str) -> dict[str, str | None]:
    return {name: folder if value == FOLDER else value for name, value in variables.items()}


def _print(agent: Agent, target: Target, arguments: list[str]) -> None:
    """Lines for a shell."""
    setting = agent.make(target)
    folder = f"$HOME/.cache/inflight/launch-{agent.program}"
    for name, text in setting.files.items():
        write = f'mkdir -p "{folder}" && printf %s {shlex.quote(text)} > "{folder}/{name}"'
        typer.echo(f"(umask 077 && {write})")  # a key is in it
    for variable, value in setting.variables.items():
        if value is None:
            typer.echo(f"unset {variable}")
        else:
            typer.echo(
                f'export {variable}="{folder}"' if value == FOLDER else f"export {variable}={shlex.quote(value)}"
            )
    typer.echo(shlex.join([agent.program, *setting.options, *arguments]))
