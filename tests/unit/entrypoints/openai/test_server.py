"""The deadline of a request counts while its body comes, and while texts are tokenised."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from inflight.entrypoints.openai.errors import add_error_handlers
from inflight.entrypoints.openai.server import within_deadline
from inflight.entrypoints.openai.strict_json import JsonRoute
from inflight.entrypoints.openai.strict_model import IgnoredFields
from inflight.entrypoints.openai.utility_routes import add_token_routes
from inflight.errors import RequestTimeoutError


def post(app: FastAPI, path: str, body: bytes, *, arrived: float = 0.0, body_seconds: float = 0.0) -> tuple[int, Any]:
    """Status and JSON of the answer to a request that came `arrived` seconds ago, and whose body takes `body_seconds`."""
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        await asyncio.sleep(body_seconds)
        if not messages:
            await asyncio.Event().wait()  # the client stays
        return messages.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "state": {"arrival_time": time.monotonic() - arrived},
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


def make_app(request_timeout: float | None, encode_seconds: float = 0.0) -> FastAPI:
    async def encode(*_: Any, **__: Any) -> list[int]:
        await asyncio.sleep(encode_seconds)
        return [1]

    async def decode(*_: Any, **__: Any) -> str:
        await asyncio.sleep(encode_seconds)
        return "a"

    engine = SimpleNamespace(
        encode=encode, decode=decode, tokenizer=None, model=SimpleNamespace(max_model_len=9, vocab_size=9)
    )
    settings = SimpleNamespace(request_timeout=request_timeout)
    server: Any = SimpleNamespace(
        engine=engine, settings=settings, check_model=lambda name: name, ignored_fields=IgnoredFields(is_strict=False)
    )
    app = FastAPI()
    app.router.route_class = JsonRoute
    app.state.request_timeout = request_timeout
    add_error_handlers(app)
    add_token_routes(app, server)
    return app


BODIES = [("/tokenize", b'{"prompt": "x"}'), ("/detokenize", b'{"tokens": [1]}')]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize(
    ("arrived", "body_seconds", "encode_seconds"), [(0.0, 90.0, 0.0), (0.0, 0.0, 90.0), (5.0, 0.0, 90.0)]
)
def test_what_takes_too_long_is_a_504(
    path: str, body: bytes, arrived: float, body_seconds: float, encode_seconds: float
) -> None:
    app = make_app(0.1, encode_seconds)
    start = time.monotonic()
    status, answer = post(app, path, body, arrived=arrived, body_seconds=body_seconds)
    assert (status, answer["error"]["code"]) == (504, "request_timeout")
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("timeout", [None, 10.0])
def test_what_is_in_time_is_answered(path: str, body: bytes, timeout: float | None) -> None:
    assert post(make_app(timeout), path, body, body_seconds=0.02)[0] == 200


def test_another_timeout_is_not_taken_for_the_deadline() -> None:
    app = SimpleNamespace(state=SimpleNamespace(request_timeout=10.0))
    request: Any = SimpleNamespace(scope={}, app=app)

    async def test() -> None:
        with pytest.raises(TimeoutError, match="mine") as caught:
            async with within_deadline(request):
                raise TimeoutError("mine")
        assert not isinstance(caught.value, RequestTimeoutError)

    asyncio.run(test())


def test_a_byte_order_mark_is_left_out() -> None:
    assert post(make_app(None), "/tokenize", b'\xef\xbb\xbf{"prompt": "x"}')[0] == 200
    assert post(make_app(None), "/tokenize", b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": "x"}')[0] == 400


@pytest.mark.parametrize(
    ("tokens", "param"), [([0, 8], None), ([8, 9], "tokens[1]"), ([1] * 9, None), ([1] * 10, "tokens")]
)
def test_tokens_are_those_of_the_model_and_no_more_than_its_context(tokens: list[int], param: str | None) -> None:
    """It has tokens 0 to 8, and a context of 9 tokens."""
    status, answer = post(make_app(None), "/detokenize", json.dumps({"tokens": tokens}).encode())
    assert status == (200 if param is None else 400)
    assert answer.get("error", {}).get("param") == param
