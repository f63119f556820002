"""Signals, drain and the death of the engine, seen from outside: a process, its exit code and what its clients read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.entrypoints.serve import shutdown as shutdown_module
from inflight.entrypoints.serve.shutdown import CUT_SECONDS, END_SECONDS, Shutdown
from tests.support.enough_time import with_enough_time
from tests.support.python_process import PythonProcess

HANDLED = (signal.SIGTERM, signal.SIGINT)
SCRIPT = Path(__file__).with_name("stand_in.py")
SECONDS = 300.0


class ServerProcess:
    def __init__(self, start_seconds: float = 0.0, **settings: Any) -> None:
        arguments = [json.dumps({"port": 0, "access_log": "off", **settings}), str(start_seconds)]
        self.popen = PythonProcess(
            [sys.executable, str(SCRIPT), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline().strip()
        assert line.isdigit(), self.popen.communicate()
        self.port = int(line)

    def request(self, method: str, target: str, connection: socket.socket | None = None) -> str:
        """The whole response."""
        with self.connect() if connection is None else contextlib.nullcontext(connection) as stream:
            self.send(stream, method, target)
            return read_all(stream)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), SECONDS)

    def send(self, stream: socket.socket, method: str, target: str) -> None:
        stream.sendall(f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())

    def start_stream(self, tokens: int, until: str = "") -> socket.socket:
        """A connection on which the first words have come. `until`: the stream ends when this file is there."""
        stream = self.connect()
        self.send(stream, "POST", f"/stream?tokens={tokens}" + (f"&until={until}" if until else ""))
        seen = b""
        while b"word" not in seen:
            seen += stream.recv(4096)
        return stream

    def wait_until(self, target: str, status: int) -> str:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            response = self.request("GET", target)
            if response.startswith(f"HTTP/1.1 {status}"):
                return response
            time.sleep(0.02)
        raise AssertionError(response)

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def end(self) -> tuple[int, str, str]:
        out, error = self.popen.communicate(timeout=SECONDS)
        return self.popen.returncode, out, error


def read_all(stream: socket.socket) -> str:
    """Until the end of one response: its connection closes, or it has a length, or the last chunk has come."""
    content = b""
    while b"\r\n0\r\n\r\n" not in content:
        head, found, body = content.partition(b"\r\n\r\n")
        lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
        if found and lengths and len(body) >= int(lengths[0]):
            break
        try:
            received = stream.recv(65536)
        except ConnectionResetError:
            break
        if not received:
            break
        content += received
    return content.decode()


@contextlib.contextmanager
def serving(start_seconds: float = 0.0, **settings: Any) -> Iterator[ServerProcess]:
    server = ServerProcess(start_seconds, **settings)
    try:
        yield server
    finally:
        if server.popen.poll() is None:
            server.popen.kill()
        server.popen.wait()
        for pipe in (server.popen.stdout, server.popen.stderr):
            assert pipe is not None
            pipe.close()


def test_while_starting_only_live_is_well() -> None:
    with serving(start_seconds=60) as server:
        assert server.wait_until("/live", 200)
        for target in ("/ready", "/health", "/v1/models", "/stream"):
            refusal = server.request("GET", target)
            assert refusal.startswith("HTTP/1.1 503"), refusal
            assert "retry-after: 5" in refusal
            assert '"code": "server_starting"' in refusal
        server.signal(signal.SIGTERM)
        code, out, _ = server.end()
        assert code == 0
        assert "closed" not in out  # there was no engine


def test_sigterm_lets_streams_end_and_refuses_new_ones(tmp_path: Path) -> None:
    release = tmp_path / "release"  # while a stream runs, the server does not end
    with serving() as server:
        server.wait_until("/v1/models", 200)
        idle = server.connect()
        assert server.request("GET", "/v1/models", idle).startswith("HTTP/1.1 200")
        streams = [server.start_stream(tokens=1, until=str(release)) for _ in range(5)]
        server.signal(signal.SIGTERM)
        refusal = server.wait_until("/ready", 503)
        assert '"code": "server_draining"' in refusal
        assert "connection: close" in refusal
        assert server.wait_until("/live", 200)
        refused = server.request("POST", "/stream?tokens=1", idle)
        assert refused.startswith("HTTP/1.1 503")
        assert "retry-after: 5" in refused
        assert idle.recv(1) == b"", "a connection is closed after its response"
        release.touch()
        for stream in streams:
            assert read_all(stream).count("[DONE]") == 1
            stream.close()
        idle.close()
        code, out, error = server.end()
        assert code == 0, error
        assert out.split("\n") == ["refused: draining", "closed", ""]


def test_what_outlives_the_shutdown_timeout_gets_a_terminal_event() -> None:
    with serving(shutdown_timeout=0.3) as server:
        server.wait_until("/v1/models", 200)
        stream = server.start_stream(tokens=10_000)
        server.signal(signal.SIGINT)
        assert "aborted" in read_all(stream)
        stream.close()
        assert server.end()[:2] == (0, "closed\n")


def test_a_second_signal_stops_an_engine_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOSE_SECONDS", "300")
    monkeypatch.setenv("CUT_SECONDS", "0.5")
    with serving() as server:
        server.wait_until("/v1/models", 200)
        server.signal(signal.SIGTERM)
        assert server.popen.stderr is not None
        while "closing" not in server.popen.stderr.readline():
            pass
        start = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.end()[0] == 128 + signal.SIGTERM
        assert 0.4 < time.monotonic() - start < 60, "CUT_SECONDS, and no more"


def test_a_log_that_nobody_reads_holds_nobody_up() -> None:
    with serving(access_log="json") as server:
        server.wait_until("/v1/models", 200)
        with server.connect() as connection:
            for _ in range(1000):  # their lines are more than a pipe takes
                server.request("GET", "/v1/models", connection)
        server.signal(signal.SIGTERM)
        assert server.popen.wait(SECONDS) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(number: signal.Signals) -> None:
    with serving() as server:
        server.wait_until("/v1/models", 200)
        stream = server.start_stream(tokens=10_000)
        server.signal(number)
        server.wait_until("/ready", 503)
        start = time.monotonic()
        server.signal(number)
        text = read_all(stream)
        assert "[DONE]" not in text
        assert "aborted" not in text
        stream.close()
        code, out, _ = server.end()
        assert (code, out) == (128 + number, "closed\n")
        assert time.monotonic() - start < 60


def test_a_client_that_reads_nothing_does_not_keep_the_server() -> None:
    with serving(shutdown_timeout=0) as server:
        server.wait_until("/v1/models", 200)
        stream = server.start_stream(tokens=10_000)
        server.signal(signal.SIGTERM)
        assert server.end()[0] == 0
        stream.close()


def test_the_death_of_the_engine_is_told_to_streams_and_ends_the_command() -> None:
    with serving() as server:
        server.wait_until("/v1/models", 200)
        stream = server.start_stream(tokens=10_000)
        server.request("POST", "/kill")
        assert "dead" in read_all(stream)
        stream.close()
        code, out, error = server.end()
        assert (code, out) == (1, "died\nclosed\n")
        assert "the engine's process is gone" in error


def test_a_unix_socket_is_served_and_its_file_goes(tmp_path: Path) -> None:
    path = tmp_path / "s"
    left = socket.socket(socket.AF_UNIX)  # a killed server's
    left.bind(os.fspath(path))
    left.close()
    script = [sys.executable, str(SCRIPT), json.dumps({"uds": str(path), "access_log": "off"}), "0"]
    with PythonProcess(script, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as popen:
        assert popen.stdout is not None
        assert popen.stdout.readline() == "None\n"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(os.fspath(path))
            client.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
        popen.send_signal(signal.SIGTERM)
        assert popen.wait(SECONDS) == 0
    assert not path.exists()


def test_a_body_may_not_be_slow() -> None:
    head = b"POST /%s HTTP/1.1\r\nContent-Length: 9\r\n\r\n"

    def check(seconds: float) -> None:
        with serving(body_timeout=seconds) as server:
            server.wait_until("/v1/models", 200)
            with server.connect() as awaited, server.connect() as answered, server.connect() as whole:
                for connection, path in ((awaited, b"read"), (answered, b"unread"), (whole, b"unread")):
                    connection.sendall(head % path + b"xx")
                whole.sendall(b"x" * 7)
                assert "200" in read_all(answered), (
                    "the response does not need the body, of which there is more to come"
                )
                assert "200" in read_all(whole)
                assert read_all(awaited).startswith("HTTP/1.1 408")
                assert answered.recv(1) == b""
                assert server.request("GET", "/v1/models", whole).startswith("HTTP/1.1 200")

    with_enough_time(check, first=0.5)


def test_connections_beyond_the_bound_are_refused() -> None:
    with serving(max_connections=2) as server:
        server.wait_until("/v1/models", 200)
        with server.connect() as first, server.connect() as second:
            assert server.request("GET", "/v1/models", first).startswith("HTTP/1.1 200")
            assert server.request("GET", "/v1/models", second).startswith("HTTP/1.1 200")
            with server.connect() as third:
                refusal = read_all(third)
            assert refusal.startswith("HTTP/1.1 503")
            assert "retry-after: 5" in refusal
            assert server.request("GET", "/v1/models", second).startswith("HTTP/1.1 200")
        server.wait_until("/v1/models", 200)


def test_a_head_may_be_neither_large_nor_slow() -> None:
    def check(seconds: float) -> None:
        with serving(max_header_bytes=2048, header_timeout=seconds) as server, server.connect() as large:
            large.sendall(b"GET /live HTTP/1.1\r\nX: ")
            for _ in range(8):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    large.sendall(b"a" * 1024)
                time.sleep(0.01)
            assert read_all(large).startswith("HTTP/1.1 431")
            with server.connect() as slow, server.connect() as silent:
                slow.sendall(b"GET /live HTTP/1.1\r\n")
                readable, _, _ = select.select([slow], [], [], SECONDS)
                assert readable
                assert slow.recv(1) == b""
                assert silent.recv(1) == b""
            server.signal(signal.SIGTERM)
            assert server.end()[0] == 0

    with_enough_time(check, first=0.5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_thread_that_hangs_does_not_keep_the_process(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(seconds: float) -> None:  # within which all but the thread must have ended
        monkeypatch.setenv("END_SECONDS", str(seconds))
        with serving(shutdown_timeout=0.1) as server:
            server.wait_until("/v1/models", 200)
            server.request("POST", "/hang")
            server.signal(number)
            code, out, error = server.end()
            assert (code, out) == (1, "closed\n")
            assert "most recent call first" in error, "it says where the thread is"

    with_enough_time(check, first=0.5)


STDERR = 99  # a descriptor to which writes do not wait


@pytest.fixture
def dumps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, dict[str, Any]]]:
    """After how many seconds the process would end with the stacks of its threads."""
    dumps: list[tuple[float, dict[str, Any]]] = []
    later = SimpleNamespace(dump_traceback_later=lambda seconds, **options: dumps.append((seconds, options)))
    monkeypatch.setattr(shutdown_module, "faulthandler", later)
    monkeypatch.setattr(shutdown_module, "open_without_waiting", lambda fd: STDERR if fd == 2 else -1)
    return dumps


def test_a_shutdown_that_hangs_ends_the_process(dumps: list[tuple[float, dict[str, Any]]]) -> None:
    shutdown = Shutdown(7.0)
    for _ in range(2):  # a second call gives no more time
        shutdown.begin()
    assert shutdown.begun.is_set() and not shutdown.cut.is_set()
    assert (shutdown.exit_code, dumps) == (0, [(7.0 + END_SECONDS, {"exit": True, "file": STDERR})])
    shutdown.cut_now(9)
    assert shutdown.cut.is_set() and shutdown.exit_code == 9
    assert dumps[1:] == [(CUT_SECONDS + END_SECONDS, {"exit": True, "file": STDERR})]
    other = Shutdown(7.0, 2.0)
    other.cut_now(3)
    assert other.begun.is_set() and dumps[2:] == [(CUT_SECONDS + 2.0, {"exit": True, "file": STDERR})]


@pytest.mark.parametrize("number", HANDLED)
def test_the_first_signal_begins_and_the_second_one_cuts(
    dumps: list[tuple[float, dict[str, Any]]], number: signal.Signals
) -> None:
    async def test() -> None:
        shutdown = Shutdown(7.0)
        with shutdown.on_signals():
            signal.raise_signal(number)
            await shutdown.begun.wait()
            assert not shutdown.cut.is_set() and signal.getsignal(number) is not signal.SIG_DFL
            signal.raise_signal(number)
            await shutdown.cut.wait()
            assert shutdown.exit_code == 128 + number
            assert [signal.getsignal(each) for each in HANDLED] == [signal.SIG_DFL] * 2, "a third one kills"
        assert len(dumps) == 2

    before = [signal.getsignal(each) for each in HANDLED]
    try:
        asyncio.run(test())
    finally:
        for each, handler in zip(HANDLED, before, strict=True):
            signal.signal(each, handler)


def test_signals_are_handled_only_while_the_server_runs() -> None:
    async def test() -> None:
        with Shutdown(7.0).on_signals():
            pass
        loop = asyncio.get_running_loop()
        assert not any(loop.remove_signal_handler(each) for each in HANDLED)

    before = [signal.getsignal(each) for each in HANDLED]
    try:
        asyncio.run(test())
    finally:
        for each, handler in zip(HANDLED, before, strict=True):
            signal.signal(each, handler)
