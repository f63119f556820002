"""`forward`: passes a request on to the process of a model, and passes the answer back piece by piece as it comes."""

import asyncio
import json
from collections.abc import Iterable
from urllib.parse import quote

import httptools

from inflight.engine.serving.client import CLIENT
from inflight.entrypoints.router.model_main import CLIENT_HEADER, OWNER_HEADER
from inflight.entrypoints.serve.asgi import Message, Receive, Scope, Send, send_error
from inflight.interface.image_prompts import OWNER

_READ_BYTES = 65536
# Headers that belong to one connection, or that the router has dealt with
_OWN_HEADERS = frozenset(
    b"host connection keep-alive proxy-connection te trailer transfer-encoding upgrade content-length expect authorization "
    b"x-api-key x-forwarded-for x-forwarded-proto origin sec-fetch-site".split()
) | {OWNER_HEADER, CLIENT_HEADER, b"x-request-id"}
_NOT_BACK = frozenset(b"connection keep-alive transfer-encoding date server".split())
_DIED = "the process of the model has ended; the next request loads the model again"


class _Answer:
    """What httptools has parsed so far of an answer."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces: list[bytes] = []
        self.has_headers = False
        self.is_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.has_headers = True

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True

    def take(self) -> bytes:
        pieces, self.pieces = self.pieces, []
        return b"".join(pieces)


async def forward(path: str, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """
    Args:
        path: the socket of the model's process.
        body: of the request, which was read from `receive`.

    If the client goes away, the connection to the process is cut, so the process aborts the request.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError:
        await _send_death(scope, send)
        return
    passing = asyncio.create_task(_pass(reader, writer, scope, body, send))
    leaving = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait([passing, leaving], return_when=asyncio.FIRST_COMPLETED)
        if passing.done():
            passing.result()
    finally:
        leaving.cancel()
        passing.cancel()
        writer.transport.abort()
        await asyncio.gather(passing, leaving, return_exceptions=True)


async def get_json(path: str, target: str) -> object:
    """The answer of a model's process to GET.

    Raises:
        OSError, ValueError: there is no answer, its status is not 200, or it is not JSON.
    """
    return json.loads(await get(path, target))


async def get(path: str, target: str) -> bytes:
    """As `get_json`, but the body as bytes."""
    status, found = 0, b""

    async def send(message: Message) -> None:
        nonlocal status, found
        status = message.get("status", status)
        found += message.get("body", b"")

    reader, writer = await asyncio.open_unix_connection(path)
    scope = {"type": "http", "method": "GET", "path": target, "query_string": b"", "headers": [], "state": {}}
    try:
        await _pass(reader, writer, scope, b"", send)
    finally:
        writer.transport.abort()
    if status != 200:
        raise ValueError(f"{target} answers {status}")
    return found


async def _pass(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, scope: Scope, body: bytes, send: Send
) -> None:
    answer = _Answer()
    parser = httptools.HttpResponseParser(answer)
    is_started = False
    try:
        writer.write(_head(scope, len(body)) + body)
        await writer.drain()
        while not answer.is_complete:
            data = await reader.read(_READ_BYTES)
            if not data:
                break
            parser.feed_data(data)
            if answer.has_headers and not is_started and (status := parser.get_status_code()) >= 200:
                is_started = True
                await send({"type": "http.response.start", "status": status, "headers": _back(scope, answer.headers)})
            if is_started and not answer.is_complete and (piece := answer.take()):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
    except (OSError, httptools.HttpParserError):
        answer.is_complete = False
    if answer.is_complete:
        await send({"type": "http.response.body", "body": answer.take()})
    elif not is_started:
        await _send_death(scope, send)
    elif any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in answer.headers):
        error = {"error": {"message": _DIED, "type": "server_error", "param": None, "code": "model_process_ended"}}
        await send({"type": "http.response.body", "body": b"data: " + json.dumps(error).encode() + b"\n\n"})
    # else: the answer stays unfinished, so uvicorn cuts the connection, and the client notices that


def _head(scope: Scope, num_bytes: int) -> bytes:
    query = scope.get("query_string", b"")
    target = quote(scope["path"], safe="/:@!$&'()*+,;=~").encode() + (b"?" + query if query else b"")
    state = scope.get("state", {})
    headers: list[tuple[bytes, bytes]] = [
        (b"host", b"localhost"),
        (b"connection", b"close"),
        (b"content-length", b"%d" % num_bytes),
        (OWNER_HEADER, OWNER.get().encode("latin-1", "replace")),
        (CLIENT_HEADER, CLIENT.get().encode("latin-1", "replace")),
        *([(b"x-request-id", state["request_id"].encode())] if state.get("has_own_id") else []),
        *((name, value) for name, value in scope["headers"] if name.lower() not in _OWN_HEADERS),
    ]
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    return b"%s %s HTTP/1.1\r\n%s\r\n" % (scope["method"].encode(), target, lines)


def _back(scope: Scope, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers for the client. The id that the process gave to the request becomes the request's."""
    found = []
    for name, value in headers:
        if name == b"x-request-id":
            scope["state"]["request_id"] = value.decode("latin-1")
        elif name not in _NOT_BACK:
            found.append((name, value))
    return found


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_death(scope: Scope, send: Send) -> None:
    await send_error(scope, send, 503, _DIED, kind="server_error", code="model_process_ended")
