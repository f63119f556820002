"""/api/... on the server with the embedded model: what Ollama's clients need."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from inflight.entrypoints.ollama import bodies
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.hub import EMBEDDED_MODEL
from tests.e2e.openai_server import MODEL, demo_args, running_server
from tests.e2e.test_openai_fields import name_fim_tokens
from tests.e2e.test_openai_strangers import EXTRACT, PERSON, SUM, WEATHER, tool

CHAT, GENERATE = "/api/chat", "/api/generate"
GREEDY = {"temperature": 0}
BASE: dict[str, Any] = {"model": MODEL, "messages": SUM, "options": GREEDY, "stream": False}
RECORDED: list[dict[str, Any]] = json.loads(Path(__file__).with_name("recorded_ollama.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    # every stream has pieces without text between the others
    settings = ServerSettings(
        served_model_names=(MODEL, "stub-model"), access_log="off", stream_keep_alive_interval=0.002
    )
    with running_server(settings=settings) as running, httpx.Client(base_url=running.url, timeout=300) as made:
        yield made


def answer(http: httpx.Client, path: str = CHAT, **more: Any) -> dict[str, Any]:
    response = http.post(path, json={**BASE, **more})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    TypeAdapter(bodies.ChatAnswer if path == CHAT else bodies.GeneratedText).validate_python(found)
    return found


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    return lines


def error_of(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    error: str = response.json()["error"]
    return error


def test_an_answer_is_the_chats_streamed_by_default(http: httpx.Client) -> None:
    found = answer(http, model=f"{MODEL}:latest")
    assert found["message"] == {"role": "assistant", "content": "7 + 5 = 12"}
    assert (found["model"], found["done_reason"]) == (f"{MODEL}:latest", "stop")
    usage = http.post("/v1/chat/completions", json={"messages": SUM, "temperature": 0}).json()["usage"]
    assert (found["prompt_eval_count"], found["eval_count"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    spans = [found[f"{name}_duration"] for name in ("load", "prompt_eval", "eval")]
    assert all(span > 0 for span in spans) and sum(spans) == pytest.approx(found["total_duration"], abs=10)
    lines = lines_of(http.post(CHAT, json={"messages": SUM, "options": GREEDY}))
    assert all(line["message"]["role"] == "assistant" for line in lines)
    assert "".join(line["message"]["content"] for line in lines) == found["message"]["content"]
    assert (lines[-1]["eval_count"], lines[-1]["model"]) == (found["eval_count"], MODEL)


def test_generate_with_and_without_the_template(http: httpx.Client) -> None:
    asked = {"prompt": SUM[0]["content"], "messages": None}
    assert answer(http, GENERATE, **asked)["response"] == "7 + 5 = 12"
    lines = lines_of(http.post(GENERATE, json={**asked, "options": GREEDY}))
    assert "".join(line["response"] for line in lines) == "7 + 5 = 12"
    raw = answer(http, GENERATE, prompt="What is", raw=True, options={"temperature": 0, "num_predict": 5})
    completion = http.post("/v1/completions", json={"prompt": "What is", "temperature": 0, "max_tokens": 5}).json()
    assert raw["response"] == completion["choices"][0]["text"]
    assert (raw["eval_count"], raw["done_reason"]) == (5, "length")


def test_a_request_without_a_prompt_only_says_that_the_model_is_loaded(http: httpx.Client) -> None:
    for path, more in ((CHAT, {"messages": []}), (GENERATE, {"prompt": ""})):
        found = answer(http, path, **more, keep_alive=-1)
        assert (found["done"], found["done_reason"]) == (True, "load")
        assert "does not exist" in error_of(http.post(path, json={"model": "other"}), 404)


def test_calls_and_their_results(http: httpx.Client) -> None:
    message = answer(http, messages=WEATHER, tools=[tool()])["message"]
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": {"city": "Porto"}}
    streamed = lines_of(http.post(CHAT, json={**BASE, "messages": WEATHER, "tools": [tool()], "stream": True}))
    calls = [made for line in streamed for made in line["message"].get("tool_calls", ())]
    assert [made["function"] for made in calls] == [call["function"]]
    result = {"role": "tool", "tool_name": "get_weather", "content": "Sunny."}
    response = http.post(CHAT, json={**BASE, "messages": [*WEATHER, message, result], "tools": [tool()]})
    assert response.status_code == 200 and "x-ignored-fields" not in response.headers


def test_a_schema_is_satisfied(http: httpx.Client) -> None:
    for path, more in ((CHAT, {"messages": EXTRACT}), (GENERATE, {"prompt": EXTRACT[0]["content"]})):
        found = answer(http, path, format=PERSON, think=False, **more)
        text = found["message"]["content"] if path == CHAT else found["response"]
        assert json.loads(text) == {"name": "Mia", "age": 34}
    assert isinstance(json.loads(answer(http, format="json", messages=EXTRACT)["message"]["content"]), dict)
    unique = {**PERSON, "description": "x", "properties": {**PERSON["properties"], "a": {"uniqueItems": True}}}
    response = http.post(CHAT, json={**BASE, "format": unique})
    assert response.headers["x-ignored-fields"] == "format: #/properties/a/uniqueItems"


def test_options_act_and_the_others_are_told(http: httpx.Client) -> None:
    assert answer(http, options={**GREEDY, "stop": ["="]})["message"]["content"] == "7 + 5 "
    assert answer(http, options={**GREEDY, "num_predict": 2})["done_reason"] == "length"
    assert answer(http, options={**GREEDY, "num_predict": -2})["done_reason"] == "stop"
    response = http.post(CHAT, json={**BASE, "options": {**GREEDY, "num_ctx": 64, "num_gpu": None}})
    assert response.headers["x-ignored-fields"] == "options.num_ctx"


def test_the_model_is_described(http: httpx.Client) -> None:
    assert http.get("/api/version").json() == {"version": "0.13.5"}
    assert (http.head("/").status_code, http.get("/").text) == (200, "Ollama is running")
    models = http.get("/api/tags").json()["models"]
    assert [model["name"] for model in models] == [MODEL, "stub-model"]
    assert models[0]["size"] > 1_000_000 and len(models[0]["digest"]) == 64
    running = http.get("/api/ps").json()["models"]
    assert [each.items() >= model.items() for each, model in zip(running, models, strict=True)] == [True, True]
    for body in ({"model": MODEL}, {"name": f"{MODEL}:latest"}, {"model": MODEL, "verbose": True}):
        shown = http.post("/api/show", json=body).json()
        TypeAdapter(bodies.ShownModel).validate_python(shown)
        info = shown["model_info"]
        assert (info["general.architecture"], info["general.basename"]) == ("qwen3", MODEL)
        assert info["qwen3.context_length"] == 2048
        assert shown["capabilities"] == ["completion", "tools"] and "<|im_start|>" in shown["template"]


def test_a_pull_of_the_served_name_succeeds_at_once(http: httpx.Client) -> None:
    states = [json.loads(line) for line in http.post("/api/pull", json={"model": MODEL}).text.splitlines()]
    assert states == [{"status": "pulling manifest"}, {"status": "success"}]
    assert http.post("/api/pull", json={"name": MODEL, "stream": False}).json() == {"status": "success"}


def test_errors(http: httpx.Client) -> None:
    for path in (CHAT, GENERATE, "/api/show", "/api/pull"):
        body = {**BASE, "prompt": "x", "model": "other:latest"}
        assert "The model `other:latest` does not exist" in error_of(http.post(path, json=body), 404)
    assert "input: this field is required" in error_of(http.post("/api/embed", json={}), 400)
    assert "cannot be changed" in error_of(http.post("/api/create", json={"model": "x"}), 404)
    assert error_of(http.get(CHAT), 405)
    assert "not valid JSON" in error_of(http.post(CHAT, content=b"{"), 400)
    long = [{"role": "user", "content": "Tell me a story. " * 2000}]
    assert "context length" in error_of(http.post(CHAT, json={**BASE, "messages": long}), 400)


@pytest.mark.parametrize(
    ("path", "more", "words"),
    [
        (CHAT, {"messages": 5}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, {"messages": [{**SUM[0], "images": ["aGk="]}]}, "messages[0].images: "),
        (CHAT, {"messages": [{**SUM[0], "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls[0].function.name"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
        (CHAT, {"tools": [tool()] * 513}, "tools"),
        (CHAT, {"options": {"temperature": "hot"}}, "options.temperature"),
        (CHAT, {"options": {"num_predict": -3}}, "options.num_predict"),
        (CHAT, {"options": {"stop": ["x"] * 1000}}, "options.stop"),
        (CHAT, {"options": []}, "options"),
        (CHAT, {"format": "xml"}, "format"),
        (CHAT, {"format": {"type": "nothing"}}, "format: "),
        (CHAT, {"think": 5}, "think"),
        (CHAT, {"stream": "no"}, "stream"),
        (CHAT, {"keep_alive": []}, "keep_alive"),
        (GENERATE, {"prompt": 5}, "prompt"),
        (GENERATE, {"prompt": "x", "images": ["aGk="]}, "images: "),
        (GENERATE, {"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        (GENERATE, {"prompt": "x", "raw": True, "system": "y"}, "system: the chat template writes it, and raw goes"),
        (GENERATE, {"prompt": "x", "suffix": "y"}, "suffix needs a model with fill-in-the-middle tokens"),
    ],
)
def test_wrong_fields_are_named(http: httpx.Client, path: str, more: dict[str, Any], words: str) -> None:
    assert words in error_of(http.post(path, json={**BASE, **more}), 400)


def test_any_type_is_json_but_from_a_web_page(http: httpx.Client) -> None:
    """curl names another type, LiteLLM names none. A page of another site must not get past CORS in this way."""
    body = json.dumps(BASE).encode()
    for kind in ("application/x-www-form-urlencoded", "text/plain", None):
        headers = {} if kind is None else {"content-type": kind}
        assert http.post(CHAT, content=body, headers=headers).status_code == 200
        assert "must be JSON" in error_of(http.post(CHAT, content=body, headers={**headers, "origin": "http://x"}), 415)
        assert http.post("/v1/chat/completions", content=body, headers=headers).status_code == 415


@pytest.mark.parametrize("recorded", RECORDED, ids=[each["name"] for each in RECORDED])
def test_recorded_requests_are_answered(http: httpx.Client, recorded: dict[str, Any]) -> None:
    body = recorded["body"]
    if body is not None and recorded["path"] in (CHAT, GENERATE):
        body = {**body, "options": {**(body.get("options") or {}), "num_predict": 3}}
    content = None if body is None else json.dumps(body).encode()
    response = http.request(recorded["method"], recorded["path"], content=content, headers=recorded["headers"])
    assert response.status_code == 200, response.text
    if recorded["path"] == CHAT and body.get("stream") is not False:
        lines_of(response)
    told = set(response.headers.get("x-ignored-fields", "").split(", "))
    assert told <= {"", "options.num_ctx", "tool_choice"}  # Ollama has no tool_choice either


def test_strict_fields_a_key_and_a_model_that_fills_in_the_middle(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((EMBEDDED_MODEL / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_bytes((EMBEDDED_MODEL / "tokenizer_config.json").read_bytes())
    name_fim_tokens(tmp_path / "tokenizer.json")
    settings = ServerSettings(
        served_model_names=(MODEL,), strict_fields=True, api_keys=("first-key-1",), access_log="off"
    )
    with (
        running_server(demo_args(tokenizer=str(tmp_path)), settings) as running,
        httpx.Client(base_url=running.url, timeout=300) as http,
    ):
        assert "No API key" in error_of(http.get("/api/tags"), 401)
        http.headers["authorization"] = "Bearer first-key-1"
        assert "insert" in http.post("/api/show", json={}).json()["capabilities"]
        found = answer(http, GENERATE, messages=None, prompt="7 + 5", suffix="= 12", options={"num_predict": 3})
        assert (found["eval_count"], found["done_reason"]) == (3, "length")
        assert "options.num_ctx" in error_of(http.post(CHAT, json={**BASE, "options": {"num_ctx": 5}}), 400)
        for path in ("/api/show", "/api/pull", CHAT):
            assert "more" in error_of(http.post(path, json={"more": 1}), 400)
