"""What the server asks of uvicorn."""

from __future__ import annotations

import asyncio
import socket
import ssl

import pytest
import uvloop

from inflight.entrypoints.serve.asgi import Receive, Scope, Send
from inflight.entrypoints.serve.server import make_uvicorn
from inflight.entrypoints.serve.settings import ServerSettings


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
                    assert await asyncio.wait_for(received, 3.0) == b"", "the server closes"
            finally:
                server.should_exit = server.force_exit = True
                await serving

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test(), 10.0))
