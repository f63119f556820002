"""/v1/chat/completions and /v1/completions: what reaches the engine, and every way in which an answer ends."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from inflight.engine.serving.admission import QueueLimits
from inflight.errors import ErrorKind
from inflight.interface.request import FinishReason
from tests.support.fakes_tokenizer import BOS_ID, EOS_ID
from tests.unit.entrypoints.api_client import MODEL, SETTINGS, Answer, Api, Exchange, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: HELLO,
    TEXT: {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"model": MODEL, "max_tokens": 20, **HELLO},
    "/api/chat": HELLO,
    "/api/generate": {"prompt": "x"},
}
REFUSED = 'requests_refused_total{model_name="played",reason="queue_full"}'
OPENED = ("/v1/responses", "/v1/messages")  # a stream of these begins at once
ALL = pytest.mark.parametrize("path", BODIES)
BOTH = pytest.mark.parametrize("path", [CHAT, TEXT])
DONE = "data: [DONE]\n\n"


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with serving(replace(SETTINGS, served_model_names=("first", "second"))) as made:
        yield made


@pytest.fixture
def held(api: Api) -> Iterator[Api]:
    """Each test says what its engine answers."""
    api.core.forget()
    api.core.held = True
    try:
        yield api
        assert api.num_running == 0
    finally:
        api.core.held = False


def started(api: Api, path: str, **more: Any) -> Exchange:
    """A request that has come to the engine."""
    before = len(api.core.sequences)
    exchange = api.open(path, {**BODIES[path], **more})
    api.until(lambda: len(api.core.sequences) > before)
    return exchange


def message_of(answer: Answer) -> str:
    """In any API's form."""
    error = answer.error
    return str(error if isinstance(error, str) else error["message"])


# -- what reaches the engine ----------------------------------------------------------------------------------------------


@BOTH
def test_fields_of_a_request_reach_the_engine(path: str) -> None:
    with serving(policy="priority") as api:
        fields = {"max_tokens": 9, "temperature": 0.25, "stop": ["!"], "seed": 5, "ignore_eos": True}
        sequence = api.asked(path, {**BODIES[path], **fields, "priority": -3, "cache_salt": "salt"})
        assert (sequence.priority, sequence.cache_salt, sequence.sampling.max_tokens) == (-3, "salt", 9)
        params = sequence.sampling.params
        assert (params.temperature, params.stop, params.seed, params.ignore_eos) == (0.25, ("!",), 5, True)
        assert api.core.prompts == [[BOS_ID, ord("x")] if path == TEXT else [*b"<user>x<assistant>"]]
        plain = api.asked(path, BODIES[path])
        assert (plain.priority, plain.cache_salt, plain.sampling.params.logprobs) == (0, "", None)
        assert plain.sampling.max_tokens == (16 if path == TEXT else 200 - len(b"<user>x<assistant>"))


@pytest.mark.parametrize(
    ("path", "prefix"), [(CHAT, "chatcmpl-"), (TEXT, "cmpl-"), ("/v1/responses", "resp-"), ("/v1/messages", "msg-")]
)
def test_an_answer_has_the_id_of_its_request(api: Api, path: str, prefix: str) -> None:
    answer = api.post(path, BODIES[path], {"x-request-id": "mine"})
    assert (answer.json["id"], answer.headers["x-request-id"]) == (f"{prefix}mine", "mine")
    one, other = (api.post(path, BODIES[path]) for _ in range(2))
    assert one.json["id"] != other.json["id"]


def test_two_requests_with_one_id_run_beside_each_other(held: Api) -> None:
    exchanges = [started(held, TEXT, request_id="same") for _ in range(2)]
    assert held.num_running == 2
    for index in (1, 0):
        held.core.emit(index, "ab"[index], FinishReason.LENGTH)
    assert [each.end().json["choices"][0]["text"] for each in exchanges] == ["a", "b"]


def test_prompts_and_answers_are_sequences_of_the_engine(api: Api) -> None:
    before = len(api.core.sequences)
    api.core.texts = ("a", "b", "c", "d")
    sent = {"prompt": ["x", "yz"], "n": 2, "model": "second"}
    try:
        answer = api.post(TEXT, sent)
    finally:
        api.core.texts = ("Hi!",)
    assert api.core.prompts[before:] == [[BOS_ID, ord("x")]] * 2 + [[BOS_ID, *b"yz"]] * 2
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2, 3]
    assert sorted(choice["text"] for choice in answer.json["choices"]) == ["a", "b", "c", "d"]
    assert (answer.json["model"], answer.json["object"]) == ("second", "text_completion")
    ids = [sequence.request_id for sequence in api.core.sequences[before:]]
    assert len(set(ids)) == 4
    assert answer.json["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


# -- answers and streams --------------------------------------------------------------------------------------------------


def test_an_answer(api: Api) -> None:
    answer = api.post(CHAT, {**HELLO, "return_token_ids": True})
    assert answer.headers["content-type"] == "application/json"
    assert "x-ignored-fields" not in answer.headers
    (choice,) = answer.json["choices"]
    assert choice["message"]["content"] == "Hi!"
    assert (choice["finish_reason"], choice["token_ids"]) == ("stop", [*b"Hi!", EOS_ID])
    assert answer.json["prompt_token_ids"] == [*b"<user>x<assistant>"]
    assert (answer.json["model"], answer.json["object"]) == ("first", "chat.completion")


@BOTH
def test_log_probabilities_of_an_answer_and_its_prompt(api: Api, path: str) -> None:
    shown = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    answer = api.post(path, {**BODIES[path], **shown, "prompt_logprobs": 2, "max_tokens": 2}).json
    (choice,) = answer["choices"]
    prompt = answer if path == CHAT else choice
    assert list(prompt["prompt_logprobs"][1]) == (["117", "118"] if path == CHAT else ["120", "121"])
    found = choice["logprobs"]
    if path == TEXT:
        assert found["tokens"] == ["H", "i"] and found["token_logprobs"] == pytest.approx([-0.72, -1.05])
    else:
        assert [each["token"] for each in found["content"]] == ["H", "i"]
        assert [len(each["top_logprobs"]) for each in found["content"]] == [1, 1]


@BOTH
def test_a_stream_has_the_pieces_then_the_usage_then_its_end(api: Api, path: str) -> None:
    answer = api.post(path, {**BODIES[path], "stream": True, "stream_options": {"include_usage": True}})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
    assert answer.text.endswith(DONE) and answer.parts[-1] == b""
    *chunks, usage = answer.events
    pieces = [chunk["choices"][0] for chunk in chunks]
    texts = [piece["text"] if path == TEXT else piece["delta"].get("content", "") for piece in pieces]
    assert "".join(texts) == "Hi!"
    assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 4)
    assert len({chunk["id"] for chunk in answer.events}) == 1


def test_a_stream_ends_with_the_usage_if_the_server_wants_it() -> None:
    with serving(replace(SETTINGS, enable_force_include_usage=True)) as api:
        for path in (CHAT, TEXT):
            answer = api.post(path, {**BODIES[path], "stream": True})
            assert answer.events[-1]["usage"]["completion_tokens"] == 4
    with serving() as api:
        assert "usage" not in api.post(TEXT, {**BODIES[TEXT], "stream": True}).text


def test_pieces_come_as_the_engine_makes_them(held: Api) -> None:
    exchange = started(held, TEXT, stream=True)
    assert not exchange.answer.status
    for piece in "ab":
        held.core.emit(0, piece)
        exchange.until(lambda: exchange.answer.parts)
        assert json.loads(exchange.answer.parts.pop().decode().removeprefix("data: "))["choices"][0]["text"] == piece
    held.core.emit(0, "", FinishReason.LENGTH)
    answer = exchange.end()
    assert answer.events[-1]["choices"][0]["finish_reason"] == "length"
    assert answer.text.endswith(DONE)


def test_a_stream_that_waits_sends_comments() -> None:
    with serving(replace(SETTINGS, stream_keep_alive_interval=0.02)) as api:
        api.core.held = True
        exchange = started(api, TEXT, stream=True)
        exchange.until(lambda: len(exchange.answer.parts) >= 2)
        assert set(exchange.answer.parts) == {b": keep-alive\n"}
        api.core.emit(0, "a", FinishReason.LENGTH)
        assert exchange.end().events[0]["choices"][0]["text"] == "a"


# -- unknown fields -------------------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("stream", [False, True])
def test_a_header_names_unknown_fields(api: Api, path: str, stream: bool) -> None:
    body = {**BODIES[path], "model": "first", "stream": stream}
    assert "x-ignored-fields" not in api.post(path, body).headers
    answer = api.post(path, {**body, "of_another": 1, "null": None})
    assert (answer.status, answer.headers["x-ignored-fields"]) == (200, "of_another")


def test_unknown_fields_may_be_refused() -> None:
    with serving(replace(SETTINGS, strict_fields=True)) as api:
        for path, body in BODIES.items():
            answer = api.post(path, {**body, "of_another": 1})
            assert answer.status == 400 and "of_another" in message_of(answer)
            assert not api.core.sequences
        for path, body in BODIES.items():
            assert api.post(path, body).status == 200


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (TEXT, lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}},
         "response_format"),
        ("/api/generate", lambda schema: {"format": schema}, "format"),
        ("/v1/responses", lambda schema: {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}},
         "text.format"),
    ],
)  # fmt: skip
def test_a_part_of_a_schema_that_is_not_enforced_is_named_as_in_its_api(
    api: Api, path: str, fields: Any, place: str
) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    answer = api.post(path, {**BODIES[path], "stream": False, **fields(schema)})
    assert answer.status == 200, answer.text
    assert answer.headers["x-ignored-fields"].startswith(place)


BAD: dict[str, Any] = {"type": "no such type"}


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (
            TEXT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": BAD}}},
            "response_format",
        ),
        ("/api/generate", {"format": BAD}, "format"),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "n", "schema": BAD}}}, "text.format"),
        ("/v1/messages", {"output_format": {"type": "json_schema", "schema": BAD}}, "output_format"),
    ],
)
def test_a_wrong_schema_is_named_as_in_its_api(api: Api, path: str, fields: dict[str, Any], place: str) -> None:
    answer = api.post(path, {**BODIES[path], **fields})
    assert answer.status == 400
    assert message_of(answer).startswith(f"{place}: #/type 'no such type' is none of array")


# -- refusals and failures ------------------------------------------------------------------------------------------------


@ALL
def test_a_model_of_another_name_is_not_found(api: Api, path: str) -> None:
    answer = api.post(path, {**BODIES[path], "model": "third"})
    if path == "/v1/messages":  # any name means the served model
        assert (answer.status, answer.json["model"]) == (200, "third")
        return
    assert answer.status == 404
    assert message_of(answer) == "The model `third` does not exist. This server has: first, second."
    if path.startswith("/v1"):
        assert (answer.error["param"], answer.error["code"]) == ("model", "model_not_found")


def test_if_the_queue_is_full_a_request_is_refused_and_counted() -> None:
    with serving(limits=QueueLimits(max_queued_requests=1), max_num_seqs=1) as api:
        api.core.held = True
        waiting = [started(api, TEXT) for _ in range(2)]
        for number, (path, stream) in enumerate(itertools.product(BODIES, (False, True)), 1):
            answer = api.post(path, {**BODIES[path], "stream": stream})
            assert (answer.status, int(answer.headers["retry-after"]) > 0) == (503, True)
            assert "the queue has no room" in message_of(answer)
            assert f"{REFUSED} {number}.0" in api.get("/metrics").text
        assert len(api.core.sequences) == 2
        for exchange in waiting:
            exchange.leave()


def test_prompts_beyond_the_queue_are_refused_together() -> None:
    with serving(limits=QueueLimits(max_queued_requests=3), max_num_seqs=1) as api:
        api.core.held = True
        waiting = [started(api, TEXT) for _ in range(2)]
        refused = api.post(TEXT, {"prompt": ["a", "b"], "n": 2})
        assert (refused.status, refused.error["code"]) == (503, "overloaded")
        assert refused.error["message"].endswith("this request would add 4; try again later")
        answer = api.post(TEXT, {"prompt": ["a", "b", "c"], "n": 2})
        assert answer.status == 400 and "6 sequences" in answer.error["message"]
        exchange = started(api, TEXT, prompt=["a", "b"])
        assert [len(api.core.sequences), api.num_running] == [4, 4]
        for each in (*waiting, exchange):
            each.leave()
        assert api.num_running == 0


def test_what_is_far_too_much_is_refused_before_it_is_prepared(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(api.core.sequences)
    answer = api.post(TEXT, {"prompt": [[5] * 190] * 256, "prompt_logprobs": 20})
    assert answer.status == 400 and "1021440 log-probabilities" in answer.error["message"]
    monkeypatch.setattr(api.engine, "process", None)
    answer = api.post(TEXT, {"prompt": ["x"] * 11, "n": 100})
    assert answer.status == 400 and "1100 sequences" in answer.error["message"]
    assert len(api.core.sequences) == before


FAILURES = [
    (ErrorKind.ENGINE, 500, {"x-should-retry": "false"}, "the server failed to answer this request"),
    (ErrorKind.OVERLOAD, 503, {"retry-after": "1"}, "too deep"),
    (ErrorKind.REQUEST, 400, {}, "too deep"),
]


@pytest.mark.parametrize(
    ("path", "stream"), [(p, s) for p in BODIES for s in (False, True) if not s or p not in OPENED]
)
@pytest.mark.parametrize(("kind", "status", "headers", "words"), FAILURES)
def test_a_failure_before_the_first_token_has_its_status(
    held: Api, path: str, stream: bool, kind: ErrorKind, status: int, headers: dict[str, str], words: str
) -> None:
    exchange = started(held, path, stream=stream)
    held.core.fail(0, "too deep", kind)
    answer = exchange.end()
    assert answer.status == status
    assert headers.items() <= answer.headers.items()
    assert message_of(answer) == words
    assert REFUSED not in held.get("/metrics").text, "it was not refused, but has failed"
    assert held.num_running == 0


@ALL
def test_a_failure_after_the_first_token_is_the_last_event(held: Api, path: str) -> None:
    exchange = started(held, path, stream=True)
    held.core.emit(0, "a")
    exchange.until(lambda: '"a"' in exchange.answer.text)
    held.core.fail(0, "too deep", ErrorKind.OVERLOAD)
    answer = exchange.end()
    assert (answer.status, answer.is_over) == (200, True)
    assert answer.text.endswith(DONE) is (path in (CHAT, TEXT, "/v1/responses"))
    assert "too deep" in answer.text.removesuffix(DONE).rstrip("\n").splitlines()[-1]


@ALL
@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_forgets_the_request_of_a_client_that_leaves(held: Api, path: str, stream: bool) -> None:
    exchange = started(held, path, stream=stream)
    if stream:
        held.core.emit(0, "a")
        exchange.until(lambda: '"a"' in exchange.answer.text)
    exchange.leave()
    assert held.core.aborted == [held.core.sequences[0].request_id]
    assert (held.num_running, exchange.answer.is_over) == (0, False)
    assert held.finished[-1].finish_reasons == ("abort",)


def test_all_prompts_of_a_client_that_leaves_end(held: Api) -> None:
    exchange = started(held, TEXT, prompt=["a", "b"], n=2)
    held.core.emit(0, "x", FinishReason.STOP)
    exchange.leave()
    assert set(held.core.aborted) == {sequence.request_id for sequence in held.core.sequences[1:]}


def test_a_deadline_ends_a_request() -> None:
    with serving(replace(SETTINGS, request_timeout=0.1)) as api:
        api.core.held = True
        for path, stream in itertools.product(BODIES, (False, True)):
            answer = api.post(path, {**BODIES[path], "stream": stream})
            assert "deadline of 0.1 s" in answer.text or "timeout of 0.1 s" in answer.text
            if not stream or path not in OPENED:
                assert answer.status == 504
            assert api.num_running == 0
        assert set(api.core.aborted) == {sequence.request_id for sequence in api.core.sequences}


def test_a_server_that_shuts_down_accepts_nothing() -> None:
    with serving() as api:
        api.runner.run(api.engine.drain(0.0))
        for path, body in BODIES.items():
            answer = api.post(path, body)
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert message_of(answer) == "the server is shutting down and accepts no new requests"
        assert REFUSED not in api.get("/metrics").text


def test_a_dead_engine_is_told() -> None:
    with serving() as api:
        api.core.held = True
        exchanges = [started(api, path, stream=False) for path in BODIES]
        api.core._finish("the GPU is gone")
        for answer in [*(exchange.end() for exchange in exchanges), *(api.post(*each) for each in BODIES.items())]:
            assert (answer.status, message_of(answer)) == (503, "the engine is not running")
