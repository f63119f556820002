"""The table of APIs: whose errors a path has, which paths each API knows, and what is left if an API is unplugged."""

from __future__ import annotations

import re
from typing import Any

import pytest
from starlette.routing import Route

from inflight.entrypoints.anthropic.api import error_form as anthropic_error
from inflight.entrypoints.apis import APIS, OPERATIONS, base_urls, error_form, methods_of
from inflight.entrypoints.http.api import plain_error
from inflight.entrypoints.http.app import build_app
from inflight.entrypoints.ollama.api import error_form as ollama_error
from tests.unit.entrypoints.api_client import MODEL, serving

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20}
# for each API: a path, a body, and the beginning of the id or the type of the answer
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": ("/v1/chat/completions", HELLO),
    "responses": ("/v1/responses", {"input": "x"}),
    "anthropic": ("/v1/messages", HELLO),
    "ollama": ("/api/chat", {**HELLO, "stream": False}),
    "pooling": ("/v1/embeddings", {"input": "x"}),
    "engine": ("/v1/engine/abort", {"request_id": "x"}),
}


@pytest.mark.parametrize(
    ("path", "headers", "form"),
    [
        ("/v1/messages", [], anthropic_error),
        ("/v1/messages/count_tokens", [], anthropic_error),
        ("/v1/models", [(b"anthropic-version", b"2023-06-01")], anthropic_error),
        ("/v1/models", [(b"x-api-key", b"k")], plain_error),
        ("/v1/messagesx", [], plain_error),
        ("/v1/chat/completions", [], plain_error),
        ("/api/chat", [], ollama_error),
        ("/apis", [], plain_error),
    ],
)
def test_whose_form_it_is(path: str, headers: Any, form: Any) -> None:
    assert error_form({"path": path, "headers": headers}) is form


def test_the_forms() -> None:
    shown = (404, "no such model", "invalid_request_error", "model", "model_not_found")
    inner = {"message": "no such model", "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    assert plain_error(*shown) == {"error": inner}
    assert anthropic_error(*shown) == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "no such model"},
    }
    assert ollama_error(*shown) == {"error": "no such model"}


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"), (413, "request_too_large"),
     (415, "invalid_request_error"), (500, "api_error"), (503, "overloaded_error"), (504, "timeout_error")],
)  # fmt: skip
def test_anthropics_type_follows_from_the_status(status: int, kind: str) -> None:
    assert anthropic_error(status, "x", "any", None, None)["error"] == {"type": kind, "message": "x"}


@pytest.mark.parametrize(
    ("message", "param", "text"),
    [
        ("is wrong", "top_k", "top_k: is wrong"),
        ("tools[0]['function'] is wrong", "tools[0].function", "tools[0]['function'] is wrong"),
    ],
)
def test_anthropics_message_names_the_field(message: str, param: str | None, text: str) -> None:
    error = {"type": "invalid_request_error", "message": text}
    assert anthropic_error(400, message, "x", param, None)["error"] == error


def test_every_api_is_asked_here() -> None:
    assert ASKED.keys() == APIS.keys()


@pytest.mark.parametrize("name", APIS)
def test_without_a_row_the_others_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(APIS, name)
    with serving() as api:
        for other, (path, body) in ASKED.items():
            answer = api.post(path, {"model": MODEL, **body})
            if other == "engine":  # its 404 says that there is no such request
                assert ("no request with the id" in answer.text) == (other != name), other
            else:
                assert answer.status == (404 if other == name else 200), other
        assert api.get("/version").status == api.get("/health").status == 200
        error = api.post(ASKED[name][0], {}).json
        assert error["error"]["code"] == "not_found", "its form of errors is gone, too"


def test_the_table_has_each_endpoint() -> None:
    """Those of the app, as Starlette writes them."""
    found: dict[str, set[str]] = {}
    with serving() as api:
        app = build_app(api.engine, api.settings, metrics=api.metrics)
    for route in app.routes:
        assert isinstance(route, Route) and route.methods is not None
        path = re.sub(r"\{[^}]*\}", "*", route.path.replace("{model:path}", "**"))
        found.setdefault(path, set()).update(route.methods - {"HEAD"})
    tables = [OPERATIONS, *(api.endpoints for api in APIS.values())]
    assert found == {path: set(methods.split()) for table in tables for path, methods in table.items()}


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/responses/input_tokens", ["POST"]),
        ("/v1/responses/resp_1", ["GET", "DELETE"]),
        ("/v1/responses/resp_1/cancel", ["POST"]),
        ("/v1/responses/resp_1/other", []),
        ("/v1/models/org/name:FILE.gguf", ["GET"]),
        ("/v1/modelsx", []),
        ("/", ["GET"]),
        ("/ping", ["GET", "POST"]),
    ],
)
def test_methods_of_a_path(path: str, methods: list[str]) -> None:
    assert methods_of(path) == methods


def test_base_urls() -> None:
    assert base_urls() == {"/v1": "OpenAI", "": "Anthropic, Ollama"}
