"""What the server asks of uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import shutil
import socket
import ssl
import subprocess
from typing import Any

import pytest
import uvloop

from inflight.entrypoints.serve import server as server_module
from inflight.entrypoints.serve.asgi import Receive, Scope, Send
from inflight.entrypoints.serve.gate import Phase
from inflight.entrypoints.serve.server import Server, StartUpClock, make_uvicorn, seconds_since_process_start
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.shutdown import Shutdown
from inflight.errors import EngineDeadError
from tests.unit.entrypoints.serve.stand_in import StandInEngine


async def no_app(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("nobody asks")


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"])
def test_a_handshake_has_no_more_time_than_a_head(sent: bytes) -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            settings = ServerSettings(header_timeout=0.1)
            server = make_uvicorn(no_app, settings, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            try:
                with socket.create_connection(listener.getsockname()) as client:
                    client.setblocking(False)
                    await asyncio.get_running_loop().sock_sendall(client, sent)
                    received = asyncio.get_running_loop().sock_recv(client, 1)
                    assert await asyncio.wait_for(received, 300.0) == b"", "the server closes"
            finally:
                server.should_exit = server.force_exit = True
                await serving

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test(), 300.0))


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_server_that_does_not_accept_early_answers_once_it_is_ready(is_ready: bool) -> None:
    """A request that comes while it starts waits for the answer. A shutdown while it starts ends it."""

    async def test() -> None:
        started, shutdown = asyncio.Event(), Shutdown(1.0)

        async def start() -> Any:
            await started.wait()
            return StandInEngine()

        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            server = Server(ServerSettings(), None, start, shutdown, accepts_early=False)
            running = asyncio.create_task(server.run(listener))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = asyncio.create_task(reader.read())
            await asyncio.sleep(0.2)
            assert not answer.done()
            if is_ready:
                started.set()
                assert b" 200 " in await answer
            answer.cancel()
            shutdown.begin()
            assert await running == 0
            writer.close()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(asyncio.wait_for(test(), 300.0))
    finally:
        faulthandler.cancel_dump_traceback_later()  # `begin` has set it: it would end the process of the tests 36 s later


def test_a_dead_engine_is_told_to_later_requests() -> None:
    async def test() -> None:
        model: Any = StandInEngine()
        model.is_dead = True
        server = Server(ServerSettings(access_log="off"), None, lambda: asyncio.sleep(0, model), Shutdown(1.0))
        with pytest.raises(EngineDeadError):
            await server._serve(model)
        assert server._gate.phase is Phase.DEAD

    asyncio.run(test())


def test_the_phases_of_a_start_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.5, 2.25])
    monkeypatch.setattr(server_module, "seconds_since_process_start", lambda: next(times))
    clock = StartUpClock()
    clock.mark("listening")
    clock.mark("engine")
    assert clock.summary() == "2.25 s: listening 0.50, engine 1.75"


@pytest.mark.skipif(shutil.which("ps") is None, reason="needs ps")
def test_the_seconds_since_the_start_of_a_process_are_those_of_ps() -> None:
    def asked() -> int:
        return int(
            subprocess.run(["ps", "-o", "etimes=", "-p", str(os.getpid())], capture_output=True, check=True).stdout
        )

    before = asked()
    assert before - 2 <= seconds_since_process_start() <= asked() + 2


class Model(StandInEngine):
    """Remembers what is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[tuple[object, ...]] = []

    def http_request(self, route: str, status: int, seconds: float) -> None:
        self.counted.append((route, status, seconds >= 0))

    def request_refused(self, reason: str) -> None:
        self.counted.append((reason,))


@pytest.mark.parametrize("is_cut", [False, True])
def test_requests_are_counted_once_there_is_a_model_and_the_exit_code_is_that_of_the_cut(is_cut: bool) -> None:
    async def test() -> None:
        started, shutdown, model = asyncio.Event(), Shutdown(5.0), Model()

        async def start() -> Any:
            await started.wait()
            return model

        async def ask(path: str) -> bytes:
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path.encode())
            answer = await reader.read()
            writer.close()
            return answer

        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            server = Server(ServerSettings(access_log="off"), None, start, shutdown)
            running = asyncio.create_task(server.run(listener))
            assert b" 503 " in await ask("/early")
            assert model.counted == []
            started.set()
            while b" 200 " not in await ask("/path"):
                pass
            assert model.counted[-1] == ("unmatched", 200, True)
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"GET /stream?tokens=1000000 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"word")
            shutdown.begun.set()
            while b" 503 " not in await ask("/late"):
                pass
            assert ("draining",) in model.counted
            if is_cut:
                shutdown.exit_code = 9
                shutdown.cut.set()
                with contextlib.suppress(ConnectionResetError):
                    assert b"aborted" not in await reader.read()
            else:
                model.aborting.set()
                assert b"aborted" in await reader.readuntil(b"aborted")
            assert await running == (9 if is_cut else 0)
            writer.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test(), 300.0))
