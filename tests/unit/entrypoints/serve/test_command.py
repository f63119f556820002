"""`run_server`: what happens in which order, without an engine, and how the process ends."""

from __future__ import annotations

import importlib
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.serve import command
from inflight.entrypoints.serve.command import run_server, warn_if_open
from inflight.entrypoints.serve.listener import Listener
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.shutdown import SIGNALS, Shutdown
from inflight.errors import ConfigError, EngineError
from tests.support.certificates import make_certificate, needs_openssl


class Played:
    """In place of the server, the supervisor, the engine's start and the end of the process: remembers what was asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.listener: Any = None
        self.is_open_at_end = True
        self.handled: list[Any] = []
        self.defect: Exception | None = None

    def serve(
        self, settings: ServerSettings, ssl_context: Any, start: Any, shutdown: Shutdown, *, terminal: Any
    ) -> Any:
        self.settings, self.ssl_context, self.start, self.shutdown = settings, ssl_context, start, shutdown
        assert not terminal.was_closed
        return self

    async def run(self, listener: socket.socket) -> int:
        self.calls.append("run")
        self.listener = listener
        self.handled = [signal.getsignal(number) for number in SIGNALS]
        if self.defect is not None:
            raise self.defect
        self.model = await self.start()
        return 7

    async def start_engine(self, settings: ServerSettings, args: EngineArgs, clock: Any) -> Any:
        self.calls.append("engine")
        self.given = (settings, args)
        self.clock = clock
        return SimpleNamespace(description="the model")

    async def supervise(
        self, settings: ServerSettings, args: EngineArgs, listener: Listener, clock: Any, _: Any
    ) -> int:
        self.calls.append("supervise")
        self.given, self.clock = (settings, args), clock
        self.listener = listener.socket
        return 8

    def exit(self, code: int) -> Any:
        self.is_open_at_end = self.listener.fileno() != -1
        raise SystemExit(code)

    def find(self, name: str) -> Any:
        self.calls.append(name.rpartition(".")[2])
        return SimpleNamespace(start=self.start_engine, supervise=self.supervise)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    played = Played()
    monkeypatch.setattr(command, "Server", played.serve)
    monkeypatch.setattr(command, "exit_now", played.exit)
    monkeypatch.setattr(importlib, "import_module", played.find)
    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGHUP)}
    yield played
    for number, handler in before.items():
        signal.signal(number, handler)


def ends(settings: ServerSettings, args: EngineArgs) -> object:
    with pytest.raises(SystemExit) as ended:
        run_server(settings, args)
    return ended.value.code


def test_one_front_end_serves_in_this_process(played: Played, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "inflight")
    settings, args = ServerSettings(port=0, shutdown_timeout=12.0), EngineArgs(model="org/m")
    before = [signal.getsignal(number) for number in SIGNALS]
    assert ends(settings, args) == 7
    assert played.calls == ["run", "engine_start", "engine"]
    assert played.settings.port != 0 and played.given == (played.settings, args)
    assert played.ssl_context is None
    assert not played.is_open_at_end
    assert played.handled != before, "signals begin the shutdown while it serves"
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, "until the server handles it"
    phases = [phase.split()[0] for phase in played.clock.summary().split(": ")[1].split(", ")]
    assert phases == ["listening", "importing"]
    ready = f"ready: http://127.0.0.1:{played.settings.port} serves the model, after "
    assert [record.getMessage().startswith(ready) for record in caplog.records] == [True]
    assert played.model.description == "the model"


def test_several_front_ends_are_supervised(played: Played, tmp_path: Path) -> None:
    settings, args = ServerSettings(uds=str(tmp_path / "socket"), api_server_count=2), EngineArgs()
    assert ends(settings, args) == 8
    assert played.calls == ["supervisor", "supervise"]
    store = Path(played.given[0].response_store)
    assert played.given == (replace(settings, response_store=str(store)), args)
    assert played.clock.summary().count("listening") == 1
    assert not store.parent.exists(), "the folder of the responses, which all front ends have used"
    assert not played.is_open_at_end and not (tmp_path / "socket").exists()


def test_an_engine_that_fails_leaves_no_listener(played: Played) -> None:
    played.defect = EngineError("it has died")
    with pytest.raises(EngineError, match="it has died"):
        run_server(ServerSettings(port=0), EngineArgs())
    assert played.listener.fileno() == -1


def test_what_is_wrong_is_found_before_anything_listens(
    played: Played, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "Listener", None)
    with pytest.raises(ConfigError, match="no/such"):
        run_server(ServerSettings(port=0), EngineArgs(model="no/such/model"))
    with pytest.raises(ConfigError, match="ssl_certfile"):
        run_server(ServerSettings(port=0, ssl_certfile=str(tmp_path / "none")), EngineArgs())
    assert not played.calls


@needs_openssl
def test_requests_come_over_tls(played: Played, tmp_path: Path) -> None:
    certfile, keyfile = make_certificate(tmp_path)
    ends(ServerSettings(port=0, ssl_certfile=certfile, ssl_keyfile=keyfile), EngineArgs())
    assert played.ssl_context is not None


@pytest.mark.parametrize(
    ("settings", "is_warned"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "127.0.0.1"}, False),
        ({"host": "0.0.0.0", "api_keys": ("a-long-enough-key-of-a-client",)}, False),
        ({"host": "0.0.0.0", "ssl_certfile": "/cert.pem", "ssl_ca_certs": "/ca.pem"}, False),
    ],
)
def test_a_server_that_is_open_to_everybody_is_warned_of(
    settings: dict[str, Any], is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_open(ServerSettings(**settings))
    assert bool(caplog.records) is is_warned


def test_the_warning_comes_with_the_start(played: Played, caplog: pytest.LogCaptureFixture) -> None:
    assert ends(ServerSettings(host="0.0.0.0", port=0), EngineArgs()) == 7
    assert "answers everybody" in caplog.text
