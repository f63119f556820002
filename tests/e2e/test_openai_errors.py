"""Wrong requests: the right 4xx with one clear message in OpenAI's shape, and nothing of the server's inside in it."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from inflight.engine.serving.admission import QueueLimits
from inflight.entrypoints.openai.bodies import ChatCompletion, ChatCompletionChunk, Completion
from inflight.entrypoints.serve.settings import ServerSettings
from tests.e2e.openai_server import MODEL, RunningServer, demo_args, running_server, wait_until_idle

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON_TYPE = {"content-type": "application/json"}
HELLO: list[Any] = [{"role": "user", "content": "What is 7 + 5?"}]
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ANY_TEXT: Any = {"type": "structural_tag", "format": {"type": "any_text"}}
TAG: Any = {"begin": "<f>", "schema": {"not": {}}, "end": "</f>"}
BAD_TAG: Any = {"type": "structural_tag", "structures": [TAG], "triggers": ["<f"]}
NO_TRIGGER: Any = {**BAD_TAG, "triggers": ["<g"]}
_INSIDE = re.compile(r"Traceback|/work/|site-packages|\.py\b|0x[0-9a-f]{6,}")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=300) as made:
        yield made


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert not _INSIDE.search(response.text), response.text
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert 0 < len(body["error"]["message"]) <= 1000
    error: dict[str, Any] = body["error"]
    return error


# path, body, param (None: not named in it), words of the message
WRONG: list[tuple[str, dict[str, Any], str | None, str]] = [
    (CHAT, {}, "messages", "required"),
    (CHAT, {"messages": []}, "messages", "at least 1"),
    (CHAT, {"messages": HELLO, "use_beam_search": True}, "use_beam_search", "False"),
    (CHAT, {"messages": HELLO, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "no prompt"),
    (CHAT, {"messages": [{"role": "", "content": "x"}]}, "messages[0].role", "at least 1"),
    (CHAT, {"messages": [{"role": "<|im_end|>", "content": "x"}]}, "messages[0].role", "pattern"),
    (CHAT, {"messages": [{"role": 3, "content": "x"}]}, "messages[0].role", "string"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0]", "no content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
        "no images",
    ),
    (CHAT, {"messages": HELLO, "stream": True, "guided_regex": "(("}, "guided_regex", "regex"),
    (CHAT, {"messages": HELLO, "tools": [TOOL, TOOL], "tool_choice": "required"}, "tools[1]", "earlier tool"),
    ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0]", "no content"),
    (CHAT, {"messages": HELLO, "temperature": "1"}, "temperature", "number"),
    (CHAT, {"messages": HELLO, "temperature": True}, "temperature", "number"),
    (CHAT, {"messages": HELLO, "n": True}, "n", "integer"),
    (CHAT, {"messages": HELLO, "n": 2.5}, "n", "integer"),
    (CHAT, {"messages": HELLO, "n": 100_000}, "n", "128"),
    (CHAT, {"messages": HELLO, "top_logprobs": 3}, "top_logprobs", "logprobs"),
    (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens", "at least 1"),
    (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options", "stream"),
    (CHAT, {"messages": HELLO, "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
    (CHAT, {"messages": HELLO, "logit_bias": {"cat": 1}}, "logit_bias", "cat"),
    (CHAT, {"messages": HELLO, "logit_bias": {"99999": 1}}, "logit_bias", "99999"),
    (CHAT, {"messages": HELLO, "logit_bias": {"1": 5, "01": -5}}, "logit_bias", "two keys for one token id"),
    (CHAT, {"messages": HELLO, "store": "yes"}, "store", "boolean"),
    (CHAT, {"messages": HELLO, "modalities": ["audio"]}, "modalities[0]", "text"),
    (CHAT, {"messages": HELLO, "functions": [{}]}, "functions[0].name", "required"),
    (CHAT, {"messages": HELLO, "web_search_options": {}}, "web_search_options", "not served: leave it out"),
    (CHAT, {"messages": HELLO, "priority": 1}, "priority", "priority"),
    (CHAT, {"messages": HELLO, "chat_template": "{{ 1 }}"}, "chat_template", "not served: leave it out"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice", "no tools"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools[0].function", "required"),
    (
        CHAT,
        {"messages": HELLO, "add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
        "exclude",
    ),
    (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, "response_format", "json_object"),
    (CHAT, {"messages": HELLO, "guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "each"),
    (CHAT, {"messages": HELLO, "guided_json": {"type": "no such type"}}, "guided_json", "type"),
    (CHAT, {"messages": HELLO, "guided_regex": "(("}, "guided_regex", "regex"),
    (
        CHAT,
        {"messages": HELLO, "structured_outputs": {"regex": "a", "grammar": "b"}},
        "structured_outputs",
        "exactly one",
    ),
    (CHAT, {"messages": HELLO, "stop": ["\ud800"]}, "stop[0]", "surrogate"),
    (
        CHAT,
        {"messages": HELLO, "structured_outputs": {"choice": ["\ud800"]}},
        "structured_outputs.choice[0]",
        "surrogate",
    ),
    (TEXT, {"prompt": []}, "prompt", "at least 1"),
    (TEXT, {"prompt": [1, "a"]}, "prompt[1]", "valid"),
    (TEXT, {"prompt": {"a": 1}}, "prompt", "string"),
    (TEXT, {"prompt": ""}, "prompt", "empty"),
    (TEXT, {"prompt": [99999]}, "prompt", "99999"),
    (TEXT, {"prompt": [5] * 3000}, "prompt", "3000 tokens"),
    (TEXT, {"prompt": ["x", ""]}, "prompt[1]", "empty"),
    (TEXT, {"prompt": [[5], [99999]]}, "prompt[1]", "99999"),
    (TEXT, {"prompt": ["x"], "options": {"logit_bias": {"99999": 1}}}, "options.logit_bias", "99999"),
    (TEXT, {"prompt": ["x", "far too long " * 40_000]}, "prompt[1]", "maximum context length is 2048 tokens. However"),
    (CHAT, {"messages": [{"role": "user", "content": "far too long " * 40_000}]}, "messages", "has at least"),
    (TEXT, {"prompt": "x", "n": 128, "logprobs": 20, "max_tokens": 1000}, None, "2688000 log-probabilities"),
    (TEXT, {"prompt": [[5] * 2000] * 10, "prompt_logprobs": 100}, None, "2020000 log-probabilities"),
    (CHAT, {"messages": HELLO, "n": 3, "logprobs": True, "top_logprobs": 100}, None, "log-probabilities"),
    (TEXT, {"prompt": "x", "max_tokens": 0}, "max_tokens", "echo"),
    (TEXT, {"prompt": "x", "suffix": "y"}, "suffix", "leave suffix out"),
    (TEXT, {"prompt": [5], "suffix": "y"}, "suffix", "text"),
    (TEXT, {"prompt": "x", "response_format": {"type": "structural_tag"}}, "response_format", "either structures"),
    (TEXT, {"prompt": "x", "response_format": ANY_TEXT}, "response_format.format.type", "triggered_tags"),
    (TEXT, {"prompt": "x", "response_format": BAD_TAG}, "response_format", "#/not is not supported"),
    (CHAT, {"messages": HELLO, "response_format": NO_TRIGGER}, "response_format", "starts with none of them"),
    (TEXT, {"prompt": "x", "best_of": 3}, "best_of", "n=1"),
    (TEXT, {"prompt": "x", "min_tokens": 20, "max_tokens": 10}, "min_tokens", "min_tokens"),
    (TEXT, {"prompt": "x", "bad_words": [""]}, "bad_words[0]", "at least 1"),
    ("/tokenize", {}, "prompt", "either"),
    ("/tokenize", {"prompt": "x", "tools": [TOOL]}, "tools", "messages"),
    ("/tokenize", {"prompt": "far too long " * 40_000}, "prompt", "has at least"),
    ("/detokenize", {"tokens": [1, 99999]}, "tokens[1]", "vocabulary"),
    ("/detokenize", {"tokens": [1] * 2049}, "tokens", "max_model_len=2048"),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"), WRONG, ids=[f"{i}-{case[3]}" for i, case in enumerate(WRONG)]
)
def test_a_wrong_request_is_a_400_that_names_it(
    client: httpx.Client, path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    sent = json.dumps(body)
    error = error_of(client.post(path, content=sent, headers={"content-type": "application/json"}), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert words in error["message"], error


BAD_JSON = [
    (b"", "missing"),
    (b"{", "JSON"),
    (b"[1]", "a JSON object"),
    (b'{"messages": NaN}', "NaN"),
    (b'{"n": -Infinity}', "-Infinity"),
    (b'{"n": 1, "n": 2}', "twice"),
    (b'{"n": ' + b"9" * 5000 + b"}", "too long"),
    (b'{"a": ' + b"[" * 100_000, "deep"),
    (b'{"a": "\xff"}', "UTF-8"),
    (b'{"temperature": 1e999, "prompt": "x"}', "finite"),
    (b'{"prompt": [' + b"5," * 300_000 + b"5]}", "262144 values"),
    (b'{"prompt": [' + b'"a",5,' * 200_000 + b"5]}", "262144 values"),
    (json.dumps({"prompt": "x", **{f"key{i}": 1 for i in range(5000)}}).encode(), "5001 keys"),
    (json.dumps({"prompt": "a, [b] {c}" * 100_000}).encode(), "has at least"),
    (b'{"prompt": "' + b'\\"' * 500_000, "Unterminated"),
]


@pytest.mark.parametrize(("content", "words"), BAD_JSON, ids=[f"{i}-{case[1]}" for i, case in enumerate(BAD_JSON)])
def test_bad_json(client: httpx.Client, content: bytes, words: str) -> None:
    error = error_of(client.post(TEXT, content=content, headers={"content-type": "application/json"}), 400)
    assert words in error["message"], error


RAW = [  # bytes that no client would send
    (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1e3\r\n\r\n{}", 400),
    (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n{}", 400),
    (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400),
    (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n", 413),
    (b"no HTTP at all\r\n\r\n", 400),
]


@pytest.mark.parametrize(("request_bytes", "status"), RAW, ids=[str(i) for i in range(len(RAW))])
def test_bytes_that_no_client_sends(server: RunningServer, request_bytes: bytes, status: int) -> None:
    url = httpx.URL(server.url)
    assert url.port is not None
    with socket.create_connection((url.host, url.port), 300) as connection:
        connection.sendall(request_bytes)
        assert connection.recv(4096).split()[1] == b"%d" % status
    assert httpx.get(f"{server.url}/health", timeout=300).status_code == 200


def test_a_text_with_many_commas_is_one_value(client: httpx.Client) -> None:
    text = "a,[{" * 100_000  # too long for the model, whose message says so
    error = error_of(client.post("/tokenize", json={"prompt": text}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert error["message"].startswith("This model's maximum context length is 2048 tokens. However, ")


def test_a_body_that_is_too_large_is_a_413(client: httpx.Client) -> None:
    for _ in range(10):  # a connection that is closed with bytes unread loses the answer every third time
        error = error_of(client.post(TEXT, content=b" " * (16 * 2**20 + 1)), 413)
        assert error["code"] == "request_too_large"


def test_other_refusals(client: httpx.Client) -> None:
    assert error_of(client.get("/v1/nothing"), 404)["code"] == "not_found"
    for path, instead in (
        ("/v1/responses/resp_1/cancel", "'resp_1' not found"),
        ("/v1/v1/chat/completions", "/v1 comes twice"),
        ("/v1/images/generations", "models take and write text here"),
        ("/completion", "use /v1/completions"),
    ):
        assert instead in error_of(client.post(path, json={}), 404)["message"], path
    for path in (CHAT, TEXT, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"):  # the base URL may lack /v1
        answered, same = (client.post(each, json={}) for each in (path, path.removeprefix("/v1")))
        assert (same.status_code, same.json()) == (answered.status_code, answered.json()) and same.status_code == 400
    assert client.get("/models").json() == client.get("/v1/models").json()
    assert error_of(client.get(TEXT), 405)["code"] == "method_not_allowed"
    options = client.options(TEXT)
    assert (options.status_code, options.headers["allow"]) == (204, "POST, OPTIONS")
    assert error_of(client.get("/v1/models/gpt-9"), 404)["code"] == "model_not_found"
    assert error_of(client.post(TEXT, json={"prompt": "x", "model": "gpt-9"}), 404)["param"] == "model"
    for encoding in ("gzip", "deflate, br", "zstd"):
        error = error_of(client.post(TEXT, content=b"x", headers={**JSON_TYPE, "content-encoding": encoding}), 415)
        assert (
            error["message"] == f"a body with Content-Encoding: {encoding} cannot be read: send it without compression"
        )
    error = error_of(client.post(TEXT, content=b"{}", headers={"content-type": "text/plain"}), 415)
    assert "application/json" in error["message"]


def test_bodies_are_what_the_document_says(client: httpx.Client) -> None:
    more = {"logprobs": True, "return_token_ids": True, "prompt_logprobs": 1, "temperature": 0}
    TypeAdapter(ChatCompletion).validate_python(client.post(CHAT, json={"messages": HELLO, **more}).json())
    text = {"prompt": "x", "logprobs": 1, "echo": True, "return_token_ids": True}
    TypeAdapter(Completion).validate_python(client.post(TEXT, json=text).json())
    chat = {"messages": HELLO, "logprobs": True, "return_token_ids": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, body, model, used in (
        (CHAT, chat, ChatCompletionChunk, options),
        (TEXT, text, Completion, options),
        (CHAT, chat, ChatCompletionChunk, {"include_usage": True}),
    ):
        response = client.post(path, json={**body, "stream": True, "stream_options": used})
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, done, end = response.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        for event in events:
            TypeAdapter(model).validate_json(event.removeprefix("data: "))


def test_endpoints_beside_generation(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"prompt": "What is 7 + 5?", "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "What is 7 + 5?"}
    chat = client.post("/tokenize", json={"messages": HELLO}).json()
    assert (
        client.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"].endswith("<|im_start|>assistant\n")
    )
    for path in ("/health", "/ping", "/ready", "/tokenizer_info", "/version", "/v1/models", "/openapi.json"):
        assert client.get(path).status_code == 200
    assert client.post("/reset_prefix_cache").json() == {"status": "reset"}
    assert client.get("/v1/models/" + MODEL).json()["max_model_len"] == 2048
    assert "/v1/models/{model:path}" in client.get("/metrics").text


ENDLESS = {"prompt": "Once", "ignore_eos": True, "max_tokens": 1900}


def test_a_deadline_is_a_504_or_an_event_of_the_stream() -> None:
    settings = ServerSettings(request_timeout=0.4)
    with running_server(settings=settings) as running, httpx.Client(base_url=running.url, timeout=300) as client:
        assert error_of(client.post(TEXT, json=ENDLESS), 504)["code"] == "request_timeout"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(running.engine, "process", lambda *_, **__: asyncio.sleep(200))  # texts are waited for, too
            start = time.monotonic()
            assert error_of(client.post(TEXT, json=ENDLESS), 504)["code"] == "request_timeout"
            assert time.monotonic() - start < 60
        assert len(running.engine._requests) == 0
    # on a busy machine no stream has begun after 0.4 s: then there is more time
    for seconds in (0.4, 4.0, 40.0):
        settings = ServerSettings(request_timeout=seconds)
        with running_server(settings=settings) as running, httpx.Client(base_url=running.url, timeout=300) as client:
            answer = client.post(TEXT, json={**ENDLESS, "n": 16, "stream": True})
            assert len(running.engine._requests) == 0
        if answer.status_code == 200:
            break
        assert error_of(answer, 504)["code"] == "request_timeout"
    *_, last, done, _ = answer.text.split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"


def test_a_drain_ends_each_stream_with_its_reason() -> None:
    with running_server() as running, httpx.Client(base_url=running.url, timeout=300) as other:
        with other.stream("POST", TEXT, json={**ENDLESS, "stream": True}) as response:
            pieces = response.iter_text()
            text = next(pieces)
            asyncio.run_coroutine_threadsafe(running.engine.drain(0.0), running.loop).result(300)
            text += "".join(pieces)
        *_, last, done, _ = text.split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
        assert error_of(other.post(TEXT, json=ENDLESS), 503)["code"] == "shutting_down"
        assert error_of(other.get("/ready"), 503)["code"] == "shutting_down"


def test_a_step_that_fails_is_the_servers_fault(caplog: pytest.LogCaptureFixture) -> None:
    args = demo_args(distributed_executor_backend="tests.unit.engine.core.broken_executor:FailingExecutor")
    with running_server(args) as running, httpx.Client(base_url=running.url, timeout=300) as client:
        for stream in (False, True):
            caplog.clear()
            error = error_of(client.post(TEXT, json={"prompt": [13], "stream": stream}), 500)
            assert (error["type"], error["code"]) == ("server_error", "engine_error")
            assert "thirteen" not in error["message"]
            assert client.post(TEXT, json={"prompt": [12], "max_tokens": 1}).status_code == 200
            assert "thirteen" in caplog.text


def test_a_request_with_too_many_sequences_is_refused_before_they_are_made(client: httpx.Client) -> None:
    def is_quick() -> bool:
        start = time.monotonic()
        error = error_of(client.post(TEXT, json={"prompt": ["x"] * 256, "n": 128, "max_tokens": 1}), 400)
        assert "32768 sequences (prompts times n) in one request; at most 1024 are allowed" in error["message"]
        return time.monotonic() - start < 2.0

    assert any(is_quick() for _ in range(10))  # other programs may use the machine


def test_a_full_queue_is_a_503_at_once() -> None:
    limits = QueueLimits(max_queued_requests=1)
    args = demo_args(max_num_seqs=1)
    with running_server(args, limits=limits) as running, httpx.Client(base_url=running.url, timeout=300) as client:
        error = error_of(client.post(TEXT, json={"prompt": ["a", "b", "c", "d"], "max_tokens": 1}), 400)
        assert "4 sequences (prompts times n) in one request; at most 2 are allowed" in error["message"]
        assert client.post(TEXT, json={"prompt": ["a", "b"], "max_tokens": 1}).status_code == 200
        with client.stream("POST", TEXT, json={**ENDLESS, "prompt": ["a", "b"], "stream": True}) as stream:
            chunks = stream.iter_text()  # kept: httpx hangs up when it is thrown away
            next(chunks)  # one runs, one waits
            response = client.post(TEXT, json={**ENDLESS, "prompt": ["c", "d"]})
            assert error_of(response, 503)["code"] == "overloaded"
            assert int(response.headers["retry-after"]) >= 1
        wait_until_idle(running)
        refused = f'inflight:requests_refused_total{{model_name="{MODEL}",reason="queue_full"}} 1.0'
        assert refused in client.get("/metrics").text
