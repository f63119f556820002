"""`BenchClient`: posts requests to a server, reads their streams, and records when each piece of the answer came."""

import json
import os
import time
from collections.abc import Mapping
from typing import Any, Self

from inflight.errors import ConfigError
from inflight.event_buffer import EventBuffer
from inflight_bench.dataset import BenchRequest
from inflight_bench.options import CHAT, COMPLETIONS, ServerOptions
from inflight_bench.record import RequestRecord

try:
    import aiohttp
except ImportError as error:
    raise ConfigError('bench serve needs aiohttp: pip install "inflight-llm[bench]"') from error

MAX_ERROR_LENGTH = 500


class BenchClient:
    """An HTTP client for one server, used with `async with`. The fields of `body` are added to the JSON of every request."""

    def __init__(self, server: ServerOptions, body: Mapping[str, Any]) -> None:  # Any: JSON
        self._server = server
        self._body = dict(body)
        connector = aiohttp.TCPConnector(limit=0)  # requests must wait in the server's queue, not in the client
        timeout = aiohttp.ClientTimeout(total=server.timeout)
        self._session = aiohttp.ClientSession(connector=connector, headers=server.headers, timeout=timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:  # Any: JSON
        """Send a POST with `body` as JSON, or a GET if `body` is None. Returns the JSON of the answer.

        Raises:
            ConnectionError: no server answers, or the server answers with an error.
        """
        try:
            async with self._session.request(
                "GET" if body is None else "POST", self._server.url + path, json=body
            ) as answer:
                if answer.status != 200:
                    text = (await answer.text())[:MAX_ERROR_LENGTH]
                    raise ConnectionError(f"{self._server.url}{path} answered with status {answer.status}: {text}")
                return await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ConnectionError(f"{self._server.url}{path} gave no answer: {_reason(error)}") from error

    def request_body(self, model: str, request: BenchRequest) -> dict[str, Any]:  # Any: JSON
        body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        is_messages = isinstance(request.prompt, list) and isinstance(request.prompt[0], dict)
        if self._server.endpoint == COMPLETIONS:
            if is_messages:
                raise ConfigError(
                    f"the dataset has messages, which {COMPLETIONS} cannot answer: give --endpoint {CHAT}"
                )
            body |= {"prompt": request.prompt, "max_tokens": request.max_tokens}
        else:
            messages = request.prompt if is_messages else [{"role": "user", "content": request.prompt}]
            body |= {"messages": messages, "max_completion_tokens": request.max_tokens}
        return body | self._body

    async def send(self, data: bytes, num_prompt_tokens: int = 0) -> RequestRecord:
        """Post the JSON of a request and read the answer to its end. An error is not raised, but put into the record.
        `num_prompt_tokens` is the client's own count; 0 if it is not known."""
        record = RequestRecord(sent=time.perf_counter(), num_prompt_tokens=num_prompt_tokens)
        try:
            headers = {"Content-Type": "application/json"}
            async with self._session.post(
                self._server.url + self._server.endpoint, data=data, headers=headers
            ) as answer:
                if answer.status != 200:
                    record.error = f"HTTP {answer.status}: {(await answer.text())[:MAX_ERROR_LENGTH]}"
                else:
                    await _read_stream(answer.content, record)
        except TimeoutError:
            record.error = f"the answer did not end within {self._server.timeout:g} s (--timeout)"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            record.error = _reason(error)
        record.ended = time.perf_counter()
        return record


def _reason(error: Exception) -> str:
    """Returns why a request failed. If there was no connection, aiohttp's own message is not used: it shows an internal
    object."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        why = error.os_error.strerror if number is None else os.strerror(number) if number > 0 else str(error.os_error)
        return f"{why}; is a server running there, and is it ready?"
    if isinstance(error, TimeoutError):
        return "no answer in time (--timeout)"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def _read_stream(content: aiohttp.StreamReader, record: RequestRecord) -> None:
    buffer = EventBuffer()
    texts: list[str] = []
    usage: Mapping[str, Any] | None = None  # Any: JSON
    is_done = False
    async for piece in content.iter_any():
        now = time.perf_counter()
        for data in buffer.push(piece):
            if data == b"[DONE]":
                is_done = True
                continue
            event = json.loads(data)
            if "error" in event:
                record.error = f"error in the stream: {json.dumps(event['error'])[:MAX_ERROR_LENGTH]}"
                continue
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                if text := _text(choice):
                    texts.append(text)
                    record.token_times.append(now)
                if choice.get("finish_reason") in ("abort", "error"):
                    record.error = record.error or f"the request ended with finish_reason {choice['finish_reason']!r}"
    record.text = "".join(texts)
    if usage is not None:
        record.num_prompt_tokens = usage["prompt_tokens"]
        record.num_output_tokens = usage["completion_tokens"]
    if not is_done:
        record.error = record.error or "the stream ended before [DONE]"
    elif usage is None:
        record.error = record.error or "the server sent no usage, so the number of output tokens is not known"


def _text(choice: Mapping[str, Any]) -> str:  # Any: JSON
    """Returns the text that a chunk adds: content, reasoning, or a part of a tool call."""
    if "delta" not in choice:
        return choice.get("text") or ""
    delta = choice["delta"]
    calls = (call.get("function") or {} for call in delta.get("tool_calls") or ())
    parts = [delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content")]
    return "".join(
        filter(None, [*parts, *(part for call in calls for part in (call.get("name"), call.get("arguments")))])
    )
