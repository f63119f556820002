"""Requests that come too slowly, and connections that are too many, on a clock that jumps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from inflight.entrypoints.serve.asgi import Receive, Scope, Send
from tests.support.virtual_time import VirtualTimeLoop
from tests.unit.entrypoints.serve.test_protocol import GET, POST, Waiting, on_loop, served

TIMES = {"header_timeout": 10.0, "body_timeout": 30.0, "keep_alive_timeout": 5.0}
HEAD = b"POST /next HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"


def in_virtual_time(test: Callable[[], Awaitable[None]]) -> None:
    on_loop(test, VirtualTimeLoop)


async def answers_at_once(scope: Scope, receive: Receive, send: Send) -> None:
    """It begins its answer before the body has come."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"begun", "more_body": True})
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest.mark.parametrize(
    ("sent", "seconds", "answer"),
    [
        (b"", 10.0, b""),
        (HEAD[:30], 10.0, b""),
        (HEAD, 30.0, b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"),
        (HEAD + b"12345", 30.0, b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"),
    ],
)
def test_a_request_that_does_not_come_is_given_up(sent: bytes, seconds: float, answer: bytes) -> None:
    """A client that has sent no whole head has asked for nothing, so it gets no answer."""

    async def test() -> None:
        app = Waiting()
        async with served(app, **TIMES) as port:
            start = asyncio.get_running_loop().time()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            assert await reader.read() == answer
            assert asyncio.get_running_loop().time() - start == pytest.approx(seconds, abs=0.1)
            writer.close()

    in_virtual_time(test)


def test_no_refusal_is_written_into_an_answer_that_has_begun() -> None:
    async def test() -> None:
        async with served(answers_at_once, **TIMES) as port:
            start = asyncio.get_running_loop().time()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD)
            answer = await reader.read()
            assert answer.count(b"HTTP/1.1") == 1 and answer.endswith(b"begun\r\n")
            assert asyncio.get_running_loop().time() - start == pytest.approx(30.0, abs=0.1)
            writer.close()

    in_virtual_time(test)


def test_a_request_behind_a_long_one_is_not_given_up() -> None:
    """The server does not read its body as long as the one before it runs."""

    async def test() -> None:
        app = Waiting()
        async with served(app, **TIMES) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(POST + HEAD)
            await app.started.wait()
            await asyncio.sleep(100.0)
            assert not app.gone.is_set()
            app.released.set()
            assert b'"/wait"' in await reader.readuntil(b"}}")
            writer.write(b"0123456789")
            assert b'"0123456789"' in await reader.readuntil(b"}}")
            writer.close()

    in_virtual_time(test)


def test_a_head_behind_an_answer_has_its_own_time() -> None:
    async def test() -> None:
        app = Waiting()
        async with served(app, **TIMES) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET)
            await reader.readuntil(b"}}")
            writer.write(HEAD[:30])
            start = asyncio.get_running_loop().time()
            assert await reader.read() == b""
            assert asyncio.get_running_loop().time() - start == pytest.approx(10.0, abs=0.1)
            writer.close()

    in_virtual_time(test)


def test_a_connection_too_many_is_refused_whatever_it_sends() -> None:
    async def test() -> None:
        app = Waiting()
        async with served(app, **TIMES, max_connections=2) as port:
            kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            for reader, writer in kept:
                writer.write(GET)
                await reader.readuntil(b"}}")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET * 3)
            refusal = await reader.read()
            assert refusal.startswith(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\n")
            assert refusal.count(b"HTTP/1.1") == 1 and len(app.paths) == 2
            writer.close()
            kept[0][1].close()
            await asyncio.sleep(1.0)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET)
            await reader.readuntil(b"}}")
            writer.close()
            kept[1][1].close()

    in_virtual_time(test)
