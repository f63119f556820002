"""A load generator that costs as little as it can: raw HTTP/1.1 on asyncio, bytes counted and looked at only afterwards.

It shares the machine with the server that it measures, so while the clock runs it parses no event: it counts how often
`data: ` comes and keeps an answer's end, where the usage stands, or all of it where the texts are to be compared.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

KEPT_BYTES = 1024  # of an answer's end
_END = b"\r\n0\r\n\r\n"  # of a chunked body: no event ends like that
_ETHERNET_SEGMENT = 1460
_SMALL_BUFFER = 4096


@dataclass(slots=True)
class Answer:
    """Times are of `time.perf_counter()`; `num_reads` counts what the kernel handed out at once."""

    sent: float = 0.0
    first_byte: float = 0.0
    ended: float = 0.0
    status: int = 0
    num_bytes: int = 0
    num_events: int = 0
    pieces: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        """Without the head, and without the sizes of chunks; of a kept answer."""
        _, _, rest = b"".join(self.pieces).partition(b"\r\n\r\n")
        chunks = []
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            count = int(size, 16)
            chunks.append(rest[:count])
            rest = rest[count + 2 :]
        return b"".join(chunks)

    @property
    def events(self) -> list[dict[str, Any]]:  # Any: JSON
        """Of a kept answer, without [DONE]."""
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]

    @property
    def num_tokens(self) -> int:
        """As the server counts them, in the usage of the last event.

        Raises:
            SystemExit: the answer is no whole stream.
        """
        end = b"".join(self.pieces)
        _, found, rest = end.rpartition(b'"completion_tokens":')
        if self.status != 200 or not found or b"data: [DONE]" not in end:
            raise SystemExit(f"status {self.status}, and no end of a stream: {end[-200:]!r}")
        return int(rest[: rest.index(b",")])


class Connection(asyncio.Protocol):
    """One request at a time, again and again while the server keeps the connection.

    Args:
        bytes_per_second: None reads as fast as it can.
        keeps_all: of answers, and not only their end.
    """

    def __init__(self, *, bytes_per_second: float | None = None, keeps_all: bool = False) -> None:
        self._rate = bytes_per_second
        self._keeps_all = keeps_all
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._left: int | None = None  # bytes of a body whose length is known
        self.answer = Answer()

    async def connect(self, port: int) -> None:
        """A slow reader has the buffers of a remote one: a loopback's hold megabytes, and he would not be noticed."""
        connected = socket.socket()
        if self._rate is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _ETHERNET_SEGMENT)
        connected.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connected, ("127.0.0.1", port))
        await loop.create_connection(lambda: self, sock=connected)

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, request: bytes) -> Answer:
        """The answer, when it has ended."""
        assert self._transport is not None
        self.answer = Answer(sent=time.perf_counter())
        self._left = None
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done
        return self.answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        answer = self.answer
        answer.num_bytes += len(data)
        answer.num_events += data.count(b"data: ")
        if not answer.status:
            self._read_head(data)
        elif self._left is not None:
            self._left -= len(data)
        pieces = answer.pieces
        if not self._keeps_all and pieces and len(data) < KEPT_BYTES:
            pieces[:] = [(pieces[-1] + data)[-KEPT_BYTES:]]
        elif self._keeps_all:
            pieces.append(data)
        else:
            pieces[:] = [data[-KEPT_BYTES:]]
        end = data if len(data) >= len(_END) else b"".join(pieces[-2:])
        if (self._left == 0) if self._left is not None else end.endswith(_END):
            self._finish()
        elif self._rate is not None and self._transport is not None:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(len(data) / self._rate, self._resume)

    def _read_head(self, data: bytes) -> None:
        """It comes in one piece: the server writes it in one."""
        self.answer.first_byte = time.perf_counter()
        self.answer.status = int(data[9:12])
        head, _, body = data.partition(b"\r\n\r\n")
        _, has_length, rest = head.lower().partition(b"content-length: ")
        if has_length:
            self._left = int(rest.split(b"\r\n")[0]) - len(body)

    def _resume(self) -> None:
        if self.is_open and self._transport is not None:
            self._transport.resume_reading()

    def _finish(self) -> None:
        self.answer.ended = time.perf_counter()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._finish()


def completion_request(prompt: Sequence[int], max_tokens: int, **more: Any) -> bytes:  # Any: JSON
    """The bytes of a POST that streams."""
    fields: Mapping[str, Any] = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
        **more,
    }
    return post("/v1/completions", fields)


def post(path: str, fields: Mapping[str, Any]) -> bytes:  # Any: JSON
    """The bytes of a POST."""
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


async def connect_all(port: int, count: int, **options: Any) -> list[Connection]:  # Any: of `Connection`
    connections = [Connection(**options) for _ in range(count)]
    for connection in connections:
        await connection.connect(port)
    return connections
