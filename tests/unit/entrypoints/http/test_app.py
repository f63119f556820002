"""The application as a whole: which paths there are, in which form each API tells its errors, what settings change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import inflight
from inflight.entrypoints.ollama.api import API_VERSION
from inflight.errors import ConfigError
from tests.unit.entrypoints.api_client import SETTINGS, Api, serving

TEXT = "/v1/completions"
JSON = {"content-type": "application/json"}
POSTED = [
    "/v1/chat/completions", TEXT, "/v1/responses", "/v1/responses/input_tokens", "/v1/messages", "/tokenize", "/detokenize",
    "/v1/messages/count_tokens", "/api/chat", "/api/generate", "/api/pull", "/api/show",
]  # fmt: skip


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with serving() as made:
        yield made


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/nothing", "there is no /v1/nothing here; the API is under /v1, its description at /docs"),
        ("/v1", "there is no page at /v1: this is how paths begin, such as /v1/chat/completions"),
        ("/v1/", "there is no page at /v1: this is how paths begin"),
        ("/v1/chat", "such as /v1/chat/completions"),
        ("/api", "such as /api/chat"),
        ("/v1/responses/resp_1/stop", "a stored response is at /v1/responses/ID"),
        ("/v1/messages/batches", "use /v1/messages"),
        ("/v1/v1/chat/completions", "/v1 comes twice"),
        ("/v1/moderations", "models take and write text here"),
        ("/embedding", "use /v1/embeddings"),
        ("/rerankers", "there is no /rerankers here; the API"),
        ("/completion", "use /v1/completions"),
        ("/v1/complete/", "use /v1/completions"),
        ("/infill", "with suffix"),
        ("/v1/files/7/content", "nothing is stored here"),
        ("/api/copy", "which cannot be changed"),
    ],
)
def test_a_path_of_another_api_is_not_found_and_what_to_use_is_told(api: Api, path: str, words: str) -> None:
    answer = api.post(path, {})
    assert answer.status == 404
    error = answer.error
    assert words in (error if isinstance(error, str) else error["message"])
    if isinstance(error, dict) and "code" in error:
        assert (error["code"], error["type"], error["param"]) == ("not_found", "invalid_request_error", None)


@pytest.mark.parametrize("path", POSTED)
def test_other_methods_are_refused(api: Api, path: str) -> None:
    answer = api.get(path)
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert f"{path} does not support the method GET" in answer.text
    if path.startswith("/v1/responses"):
        assert answer.error["code"] == "method_not_allowed"
    answer = api.get(path, method="OPTIONS")
    assert (answer.status, answer.headers["allow"], answer.text) == (204, "POST, OPTIONS", "")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/tokenizer_info",
        "/version",
        "/health",
        "/ready",
        "/metrics",
        "/api/version",
        "/api/tags",
        "/api/ps",
    ],
)
def test_what_is_read_is_not_written(api: Api, path: str) -> None:
    assert api.get(path).status == 200
    answer = api.post(path, {})
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")
    assert api.get(path, method="HEAD").status == 200


@pytest.mark.parametrize("path", POSTED)
def test_bodies_are_strict_json(api: Api, path: str) -> None:
    """In each API's form."""
    for content, headers, status, words in (
        (b"", JSON, 400, "the body is missing"),
        (b"[1]", JSON, 400, "a JSON object"),
        (b'{"a": NaN}', JSON, 400, "NaN is not a JSON number"),
        (b"{}", {**JSON, "content-encoding": "gzip"}, 415, "without compression"),
        (b"{}", {"content-type": "text/plain", "origin": "http://x"}, 415, "set Content-Type to application/json"),
    ):
        answer = api.post(path, content, headers)
        assert answer.status == status, answer.text
        error = answer.error
        message = error if isinstance(error, str) else error["message"]
        assert words in message
        assert isinstance(error, str) is path.startswith("/api/")
        assert (answer.json.get("type") == "error") is path.startswith("/v1/messages")
        assert isinstance(error, str) or ("code" in error) is not path.startswith("/v1/messages")


def test_ollamas_clients_need_no_content_type(api: Api) -> None:
    body = b'{"prompt": "x", "stream": false}'
    assert api.post("/api/generate", body, {"content-type": "text/plain"}).json["response"] == "Hi!"
    assert api.post(TEXT, body, {"content-type": "text/plain"}).status == 415


def test_a_client_of_anthropic_gets_errors_in_its_form(api: Api) -> None:
    answer = api.get("/v1/models/other", {"anthropic-version": "2023-06-01"})
    assert answer.json["error"]["type"] == "not_found_error"
    assert api.get("/v1/models/other").error["code"] == "model_not_found"


def test_a_wrong_value_is_named(api: Api) -> None:
    answer = api.post("/v1/chat/completions", {"messages": [{"role": 3, "content": "x"}], "temperature": "1"})
    assert (answer.status, answer.error["param"]) == (400, "temperature")
    assert "messages[0].role" in answer.error["message"]


def test_an_error_of_the_server_tells_nothing(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(api.engine, "process", broken)
    answer = api.post(TEXT, {"prompt": "x"})
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert "secret" not in answer.text
    monkeypatch.setattr(api.engine, "check_health", broken)
    assert api.get("/health").status == 500


def test_the_document_describes_every_endpoint(api: Api) -> None:
    document = api.get("/openapi.json").json
    assert document["info"] == {"title": "Inflight", "version": inflight.__version__}
    paths = document["paths"]
    assert set(POSTED) < set(paths)
    assert not {"/ping", "/"} & set(paths)
    for path in POSTED:
        answers = paths[path]["post"]["responses"]
        assert {"200", "4XX", "5XX"} <= set(answers)
        full = "503" if path.startswith("/api/") else "503, with Retry-After"
        assert answers["5XX"]["description"] == f"The queue is full ({full}), or the server failed."
    kinds = {path: set(paths[path]["post"]["responses"]["200"]["content"]) for path in POSTED}
    for path in ("/v1/chat/completions", TEXT, "/v1/responses", "/v1/messages"):
        assert kinds[path] == {"application/json", "text/event-stream"}
    assert kinds["/api/chat"] == kinds["/api/generate"] == {"application/json", "application/x-ndjson"}
    assert kinds["/tokenize"] == {"application/json"}
    told = {path: paths[path]["post"]["responses"]["200"]["description"] for path in POSTED}
    assert told["/v1/chat/completions"] == "A ChatCompletion; with stream, events of ChatCompletionChunk, then [DONE]."
    assert told[TEXT] == "A Completion; with stream, events of Completion, then [DONE]."
    assert told["/v1/responses"] == "A Response; with stream, events of ResponseEvent, then [DONE]."
    assert api.get("/docs").status == 200


def test_the_documents_may_be_left_out() -> None:
    with serving(replace(SETTINGS, disable_fastapi_docs=True)) as api:
        assert [api.get(path).status for path in ("/openapi.json", "/docs", "/redoc", "/version")] == [
            404,
            404,
            404,
            200,
        ]


def test_paths_are_not_guessed() -> None:
    with serving(wrapped=False) as api:
        assert api.get("/version/").status == 404
        assert api.get("/redoc").status == api.get("/docs/oauth2-redirect").status == 404


@pytest.mark.filterwarnings("ignore:The `root_path` parameter is deprecated")
def test_the_prefix_of_a_proxy_is_in_the_document() -> None:
    with serving(replace(SETTINGS, root_path="/llm")) as api:
        assert api.get("/openapi.json").json["servers"] == [{"url": "/llm"}]
        assert api.get("/llm/version").json == {"version": inflight.__version__}


def test_a_parser_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="no_such"), serving(replace(SETTINGS, tool_call_parser="no_such")):
        pass


def test_ollamas_version(api: Api) -> None:
    assert api.get("/api/version").json == {"version": API_VERSION}
    answer = api.get("/")
    assert (answer.text, answer.headers["content-type"]) == ("Ollama is running", "text/plain; charset=utf-8")
