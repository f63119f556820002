"""The HTTP protocol on real connections, with small apps: who is told that a client has gone, and what is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from inflight.entrypoints.serve import protocol
from inflight.entrypoints.serve.asgi import ASGIApp, Receive, Scope, Send, send_json
from inflight.entrypoints.serve.protocol import MAX_PIPELINED_BYTES, MAX_PIPELINED_REQUESTS, bounded_protocol
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.size_limits import SizeLimits
from tests.support.virtual_time import VirtualTimeLoop

SECONDS = 300.0
GET = b"GET /next HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /wait HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nhi"


class Waiting:
    """The app of one connection: /wait answers when it is let, or ends when its client has gone; the others answer at once."""

    def __init__(self) -> None:
        self.started, self.released, self.gone = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.paths: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] == "/wait":
            self.started.set()
            released, listening = asyncio.ensure_future(self.released.wait()), asyncio.ensure_future(receive())
            await asyncio.wait([released, listening], return_when=asyncio.FIRST_COMPLETED)
            released.cancel()
            if listening.done():
                assert listening.result()["type"] == "http.disconnect"
                self.gone.set()
                return
            listening.cancel()
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        await send_json(send, 200, {"path": scope["path"], "body": body.decode(), "headers": headers})


@contextlib.asynccontextmanager
async def served(app: ASGIApp, **settings: Any) -> AsyncIterator[int]:
    """The port; connections that are open at the end are cut."""
    bounded = bounded_protocol(ServerSettings(**settings))
    config = uvicorn.Config(cast("Any", app), http=bounded, ws="none", lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: bounded(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)


def on_loop(
    test: Callable[[], Awaitable[None]], make_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
) -> None:
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(cast("Any", asyncio.wait_for(test(), SECONDS)))


@pytest.mark.parametrize("between", [0.0, 0.02])
@pytest.mark.parametrize(
    "behind", [GET, GET * 3, b"POST /next HTTP/1.1\r\nContent-Length: 200000\r\n\r\n" + b"x" * 150_000]
)
def test_a_client_that_goes_ends_what_runs_also_with_requests_behind_it(behind: bytes, between: float) -> None:
    async def test() -> None:
        app = Waiting()
        async with served(app) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(POST)
            if between:
                await app.started.wait()
            writer.write(behind)
            await writer.drain()
            await app.started.wait()
            await asyncio.sleep(between)
            writer.close()
            start = time.monotonic()
            await app.gone.wait()
            assert time.monotonic() - start < 60
            assert app.paths == ["/wait"], "what waited is not begun"

    on_loop(test)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def test() -> None:
        app = Waiting()
        async with served(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            large = b"x" * 150_000
            writer.write(POST + b"POST /large HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(large) + large + GET)
            await app.started.wait()
            app.released.set()
            answers = [await read_json(reader) for _ in range(3)]
            assert [answer["path"] for answer in answers] == ["/wait", "/large", "/next"]
            assert len(answers[1]["body"]) == len(large)
            writer.close()

    on_loop(test)


@pytest.mark.parametrize("behind", [GET * (MAX_PIPELINED_REQUESTS + 2), GET + b"X" * (MAX_PIPELINED_BYTES + 70_000)])
def test_what_waits_on_a_connection_is_bounded(behind: bytes) -> None:
    async def test() -> None:
        app = Waiting()
        async with served(app, max_header_bytes=2**20) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(POST)
            await app.started.wait()
            writer.write(behind)
            await app.gone.wait()
            writer.close()

    on_loop(test)


async def read_json(reader: asyncio.StreamReader) -> dict[str, Any]:
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return cast("dict[str, Any]", json.loads(await reader.readexactly(length)))


@pytest.mark.parametrize("cut", [1, 7, 60, 10_000])
@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_an_upgrade_is_ignored_and_its_body_is_read(framing: str, cut: int) -> None:
    head = b"POST /read HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMA\r\n"
    head += b"Upgrade: h2c\r\n"
    body = b'{"model": "m"}'
    body = (
        b"Content-Length: %d\r\n\r\n" % len(body) + body
        if framing == "length"
        else b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    )
    content = (head + body) * 2 + GET  # the connection goes on

    async def test() -> None:
        async with served(Waiting()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for at in range(0, len(content), cut):
                writer.write(content[at : at + cut])
                await asyncio.sleep(0)
            first, second, third = [await read_json(reader) for _ in range(3)]
            assert first["body"] == second["body"] == '{"model": "m"}'
            assert third["path"] == "/next"
            assert "upgrade" not in first["headers"]
            writer.close()

    on_loop(test)


def test_a_websocket_is_not_opened_and_connect_is_refused() -> None:
    async def test() -> None:
        async with served(Waiting()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
            assert (await read_json(reader))["path"] == "/ws"
            writer.write(b"CONNECT other:443 HTTP/1.1\r\nHost: other\r\n\r\nGET / HTTP/1.1\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 501")
            writer.close()

    on_loop(test)


async def endless(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    gone = asyncio.ensure_future(receive())
    while not gone.done():
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        await asyncio.sleep(0)
    scope["app_ended"].set()


async def large(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
    await send({"type": "http.response.body", "body": b"x" * 2**25})
    scope["app_ended"].set()


@pytest.mark.parametrize("app", [endless, large])
@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_reads_nothing_is_let_go_and_a_slow_one_is_not(app: ASGIApp, reads: bool) -> None:
    async def test() -> None:
        ended = asyncio.Event()

        async def with_event(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, "app_ended": ended}, receive, send)

        async with served(with_event, write_timeout=0.15) as port:
            loop = asyncio.get_running_loop()
            with socket.socket() as client:
                if not reads:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await loop.sock_connect(client, ("127.0.0.1", port))
                await loop.sock_sendall(client, GET)
                if reads:  # slowly: it takes several timeouts
                    received = 0
                    while received < 2**25:
                        await asyncio.sleep(0.002)
                        received += (count := len(await loop.sock_recv(client, 2**16)))
                        assert count, "the server has closed"
                    return
                await ended.wait()
                await asyncio.sleep(0.5)
                received = 0
                with contextlib.suppress(ConnectionResetError):
                    while part := await loop.sock_recv(client, 2**20):
                        received += len(part)
                assert received < 2**25, "the rest was dropped"

    on_loop(test, VirtualTimeLoop)


def test_curl_asks_for_http2_and_gets_an_answer() -> None:
    async def test() -> None:
        async with served(Waiting()) as port:
            command = ["curl", "-sS", "--http2", "-d", '{"a": 1}', f"http://127.0.0.1:{port}/read"]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
            if "the installed libcurl version does" in done.stderr:
                pytest.skip("this curl has no HTTP/2")
            assert json.loads(done.stdout)["body"] == '{"a": 1}', done

    if subprocess.run(
        [sys.executable, "-c", "import shutil; exit(shutil.which('curl') is None)"], check=False
    ).returncode:
        pytest.skip("there is no curl")
    on_loop(test)


class FullTransport:
    """Of a client that leaves a little unread: less than what pauses the writer."""

    def __init__(self) -> None:
        self.is_aborted = asyncio.Event()
        self.num_unsent = 100
        self._is_closing = False

    def get_extra_info(self, name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def write(self, data: bytes) -> None:
        """What the client leaves unread is `num_unsent`."""

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def abort(self) -> None:
        self.is_aborted.set()


@pytest.mark.parametrize("end", ["response", "idle", "resumed"])
def test_the_last_of_a_response_is_not_waited_for_without_end(end: str) -> None:
    """Also if the client has read so much that the writer could go on: nothing more will be written."""

    async def test() -> None:
        protocol_class = bounded_protocol(ServerSettings(write_timeout=0.1))
        config = uvicorn.Config(cast("Any", large), http=protocol_class, ws="none", lifespan="off", log_config=None)
        config.load()
        protocol, transport = protocol_class(config, ServerState(), {}), FullTransport()
        protocol.connection_made(cast("Any", transport))
        if end == "response":
            transport.close()  # as uvicorn does after `Connection: close`
            protocol.on_response_complete()
        elif end == "resumed":
            protocol.pause_writing()
            transport.close()
            protocol.on_response_complete()
            protocol.resume_writing()
        else:
            protocol.timeout_keep_alive_handler()
        transport.num_unsent -= 1
        await asyncio.sleep(0.15)
        assert not transport.is_aborted.is_set(), "it has read something"
        await transport.is_aborted.wait()
        protocol.connection_lost(None)

    on_loop(test, VirtualTimeLoop)


def test_a_connection_that_sends_its_next_request_is_no_longer_idle() -> None:
    """Otherwise a request that takes longer to arrive than `keep_alive_timeout` would be cut off."""

    async def test() -> None:
        config = uvicorn.Config(cast("Any", Waiting()), http=bounded_protocol(ServerSettings()), lifespan="off")
        config.load()
        protocol = bounded_protocol(ServerSettings())(config, ServerState(), {})
        protocol.connection_made(cast("Any", FullTransport()))
        protocol.data_received(GET)
        while protocol.timeout_keep_alive_task is None:
            await asyncio.sleep(0)
        idle = protocol.timeout_keep_alive_task
        protocol.data_received(GET[:10])
        assert idle.cancelled()
        protocol.connection_lost(None)

    on_loop(test)


CHUNKED = b"POST /read HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n"


def test_trailers_are_read_and_are_no_headers() -> None:
    async def test() -> None:
        async with served(Waiting()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(CHUNKED + b"0\r\nAuthorization: Bearer sk-other\r\nHost: other\r\n\r\n" + GET)
            first, second = await read_json(reader), await read_json(reader)
            assert first["body"] == "hi" and second["path"] == "/next"
            assert first["headers"] == {"host": "localhost", "transfer-encoding": "chunked"}
            writer.close()

    on_loop(test)


@pytest.mark.parametrize("beginning", [b"0\r\n", b"0\r\nX: ", b"2;"])
def test_what_comes_without_a_body_is_bounded_like_a_head(beginning: bytes) -> None:
    """Trailers, one trailer, the extension of a chunk: without a bound, the server would keep all that comes."""

    async def test() -> None:
        async with served(Waiting(), max_header_bytes=2048) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(CHUNKED + beginning)
            with contextlib.suppress(ConnectionError):
                for i in range(40):
                    writer.write(b"Y%d: z\r\n" % i * 20 if beginning == b"0\r\n" else b"y" * 200)
                    await writer.drain()
                    await asyncio.sleep(0.002)
                assert (await reader.read()).startswith(b"HTTP/1.1 431")
            writer.close()

    on_loop(test)


async def refuse_unread(scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, 401, {"why": "no key"})


@pytest.mark.parametrize("head", [b"Transfer-Encoding: chunked", b"Content-Length: 99999999999"])
def test_a_body_that_comes_after_its_answer_is_not_read_without_end(head: bytes) -> None:
    """As from a client without a key, whose requests are answered before their bodies are read."""

    async def test() -> None:
        async with served(refuse_unread, max_body_bytes=20_000, body_timeout=1000.0) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /read HTTP/1.1\r\n" + head + b"\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 401")
            with contextlib.suppress(ConnectionError):
                while not writer.is_closing():
                    writer.write(b"a\r\n0123456789\r\n" * 100)
                    await writer.drain()
                    await asyncio.sleep(0.001)
                await reader.read()
            writer.close()

    on_loop(test)


def test_a_body_that_comes_after_its_answer_is_received_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "UNREAD_PAUSE_SECONDS", 1000.0)

    async def test() -> None:
        async with served(refuse_unread, max_body_bytes=2**28, max_total_body_bytes=2**28) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.transport.set_write_buffer_limits(0)  # `drain` waits until everything is with the kernel
            writer.write(b"POST /read HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 401")
            writer.write(b"x" * 50_000_000)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(writer.drain(), 0.5)
            writer.transport.abort()

    on_loop(test)


@pytest.mark.parametrize("head", [b"Transfer-Encoding: chunked", b"Content-Length: 99999999999"])
def test_a_body_above_the_limit_is_refused_before_it_is_read(head: bytes) -> None:
    """The answer is complete while the body still comes; then the connection ends."""

    async def test() -> None:
        async with served(SizeLimits(Waiting(), ServerSettings(max_body_bytes=20_000)), max_body_bytes=20_000) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = b"10000\r\n" + b"x" * 65_536 if head.startswith(b"Transfer") else b""
            writer.write(b"POST /read HTTP/1.1\r\n" + head + b"\r\n\r\n" + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 413") and b"connection: close" in answer
            length = int(answer.lower().partition(b"content-length: ")[2].split()[0])
            assert json.loads(await reader.readexactly(length))["error"]["code"] == "request_too_large"
            assert await reader.read() == b""
            writer.close()

    on_loop(test)


def test_the_head_behind_a_large_body_is_not_counted_with_it() -> None:
    async def test() -> None:
        async with served(Waiting(), max_header_bytes=1024) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = b"x" * 20_000
            writer.write(b"POST /read HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body + GET[:9])
            assert (await read_json(reader))["body"] == body.decode()
            writer.write(GET[9:])
            assert (await read_json(reader))["path"] == "/next"
            writer.close()

    on_loop(test)


@pytest.mark.parametrize("behind", [b"\0\r\n\r\n", GET[:9] + b"x" * 100_000])
def test_no_refusal_is_written_into_the_response_of_another_request(behind: bytes) -> None:
    async def test() -> None:
        began = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"data", "more_body": True})
            began.set()
            while (await receive())["type"] != "http.disconnect":
                pass

        async with served(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET)
            await began.wait()
            writer.write(behind)
            received = b""
            with contextlib.suppress(ConnectionError):
                while part := await reader.read(2**16):
                    received += part
            assert received.count(b"HTTP/1.1") == 1
            writer.close()

    on_loop(test)


@pytest.mark.parametrize("behind", [b"0\r\n" + b"X: y\r\n" * 20_000, b"not a length\r\n"])
def test_no_refusal_follows_a_response_that_came_before_the_end_of_its_request(behind: bytes) -> None:
    async def test() -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send_json(send, 401, {})

        async with served(app, max_header_bytes=1024) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(CHUNKED)
            received = await reader.readuntil(b"{}")
            writer.write(behind)
            with contextlib.suppress(ConnectionError):
                while part := await reader.read(2**16):
                    received += part
            assert received.count(b"HTTP/1.1") == 1
            writer.close()

    on_loop(test)


async def stream_three(scope: Scope, receive: Receive, send: Send) -> None:
    """Three pieces without a length, the last of them in a message of its own; /length: a body with a length."""
    if scope["path"] == "/length":
        await send_json(send, 200, {"a": 1})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for piece in (b"data: 1\n\n", b"data: 2\n\n"):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: 3\n\n"})


async def exchange(app: ASGIApp, sent: bytes) -> tuple[bytes, bytes]:
    """Head and body of what comes until the server closes the connection."""
    async with served(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    return head.lower(), body


@pytest.mark.parametrize("version", [b"1.0", b"0.9"])
@pytest.mark.parametrize(
    "more", [b"", b"Connection: keep-alive\r\n", b"Connection: close\r\n", b"Expect: 100-continue\r\n"]
)
def test_http_1_0_has_no_chunks(version: bytes, more: bytes) -> None:
    async def test() -> None:
        begin = b"HTTP/" + version + b"\r\n" + more
        head, body = await exchange(stream_three, b"POST /stream " + begin + b"Content-Length: 2\r\n\r\nhi")
        assert b"transfer-encoding" not in head and b"content-length" not in head and b"connection: close" in head
        assert body == b"data: 1\n\ndata: 2\n\ndata: 3\n\n"
        head, body = await exchange(stream_three, b"GET /length " + begin + b"\r\n")
        assert b"content-length: " in head
        assert json.loads(body) == {"a": 1}
        head, body = await exchange(stream_three, b"HEAD /stream " + begin + b"\r\n")
        assert b"200 ok" in head and body == b""

    on_loop(test)


def test_a_stream_of_http_1_0_comes_piece_by_piece() -> None:
    go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def test() -> None:
        async with served(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(5) == b"first"
            go_on.set()
            assert await reader.read() == b""
            writer.close()

    on_loop(test)


def test_http_1_1_keeps_its_chunks() -> None:
    async def test() -> None:
        head, body = await exchange(stream_three, b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert b"transfer-encoding: chunked" in head and body.startswith(b"9\r\ndata: 1")

    on_loop(test)
