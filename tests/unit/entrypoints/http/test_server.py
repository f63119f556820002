"""The id, trace, replica, log and deadline of a request. The deadline counts while its body comes and texts are tokenised."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from inflight.entrypoints.fields.strict_model import IgnoredFields
from inflight.entrypoints.http.error_handlers import add_error_handlers
from inflight.entrypoints.http.server import within_deadline
from inflight.entrypoints.http.strict_json import JsonRoute
from inflight.entrypoints.openai.utility_routes import add_token_routes
from inflight.errors import RequestTimeoutError
from inflight.metrics.log_lines import RequestLog
from inflight.sampling_params import SamplingParams
from tests.unit.entrypoints.api_client import Api, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WHOLE: dict[str, Any] = {CHAT: {"messages": [{"role": "user", "content": "x"}]}, TEXT: {"prompt": "x"}}
BOTH = pytest.mark.parametrize("path", WHOLE)


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


# -- whole requests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with serving() as made:
        yield made


def test_the_trace_of_a_request_is_passed_on(api: Api) -> None:
    trace = {"traceparent": "00-a-b-01", "tracestate": "c=d"}
    api.asked(TEXT, WHOLE[TEXT], {**trace, "baggage": "e=f"})
    assert api.finished[-1].trace_headers == trace
    api.asked(TEXT, WHOLE[TEXT], {"tracestate": "c=d"})
    assert api.finished[-1].trace_headers == {"tracestate": "c=d"}


@BOTH
def test_the_body_may_choose_the_id_and_the_header_comes_first(api: Api, path: str) -> None:
    body = {**WHOLE[path], "request_id": "body"}
    answer = api.post(path, body)
    assert (answer.json["id"].partition("-")[2], answer.headers["x-request-id"]) == ("body", "body")
    assert ".body-" not in api.core.sequences[-1].request_id and "-body-" in api.core.sequences[-1].request_id
    answer = api.post(path, body, {"x-request-id": "header"})
    assert (answer.json["id"].partition("-")[2], answer.headers["x-request-id"]) == ("header", "header")


def test_an_app_without_middlewares_makes_ids() -> None:
    with serving(wrapped=False) as api:
        ids = [api.post(TEXT, WHOLE[TEXT]).json["id"] for _ in range(2)]
        assert len(set(ids)) == 2 and all(len(each) == len("cmpl-") + 32 for each in ids)
        assert api.post(TEXT, {**WHOLE[TEXT], "request_id": "mine"}).json["id"] == "cmpl-mine"


@pytest.mark.parametrize(
    ("header", "replica"), [({"x-data-parallel-rank": "1"}, 1), ({"x-data-parallel-rank": "0"}, 0)]
)
def test_a_header_chooses_the_replica(header: dict[str, str], replica: int) -> None:
    with serving(num_replicas=2) as api:
        for _ in range(3):
            assert api.post(TEXT, WHOLE[TEXT], header).status == 200
        assert [len(core.sequences) for core in api.cores] == [3 * (replica == 0), 3 * (replica == 1)]


@pytest.mark.parametrize("rank", ["", "-1", "1.0", "x", "0, 0", "\u00b2", "1" * 10, "1" * 9, "2"])
def test_a_rank_that_is_none_is_refused(api: Api, rank: str) -> None:
    answer = api.post(TEXT, WHOLE[TEXT], {"x-data-parallel-rank": rank})
    assert answer.status == 400
    is_number = rank in ("1" * 9, "2")
    words = "names no replica" if is_number else f"X-Data-Parallel-Rank: {rank!r} is not the number of a replica"
    assert words in answer.error["message"]


def test_the_log_has_each_prompt() -> None:
    class Log(RequestLog):
        def __init__(self) -> None:
            self.lines: list[tuple[str, str, int, SamplingParams]] = []

        def request_started(self, route: str, request_id: str, num_prompt_tokens: int, params: SamplingParams) -> None:
            self.lines.append((route, request_id, num_prompt_tokens, params))

    log = Log()
    with serving(request_log=log) as api:
        api.post(TEXT, {"prompt": ["x", "yz"], "max_tokens": 3}, {"x-request-id": "mine"})
    assert [(route, tokens, params.max_tokens) for route, _, tokens, params in log.lines] == [
        (TEXT, 2, 3),
        (TEXT, 3, 3),
    ]
    first, second = (request_id for _, request_id, _, _ in log.lines)
    assert first.startswith("cmpl-mine-") and (first[-2:], second) == ("-0", f"{first[:-2]}-1")
