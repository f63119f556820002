"""/v1/messages on the server with the embedded model: what Anthropic's clients and Claude Code need."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from inflight.entrypoints.anthropic.bodies import AnthropicErrorBody, Message
from inflight.entrypoints.serve.settings import ServerSettings
from tests.e2e.openai_server import MODEL, running_server
from tests.e2e.test_openai_strangers import EXTRACT, PERSON, SUM, WEATHER
from tests.e2e.test_openai_strangers import tool as chat_tool
from tests.unit.entrypoints.anthropic.recordings import IGNORED, RECORDED

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
BASE: dict[str, Any] = {"messages": SUM, "max_tokens": 40, "temperature": 0, "model": "claude-opus-5-5"}
FUNCTION = chat_tool()["function"]
TOOL = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
CALL = {"type": "tool_use", "id": "1", "name": "get_weather", "input": {}}
LONG = [{"role": "user", "content": "Tell me a story about a fox named Anna in the forest. " * 200}]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    # every stream has pings between its events: clients pass over them
    settings = ServerSettings(served_model_names=(MODEL,), access_log="off", stream_keep_alive_interval=0.002)
    with running_server(settings=settings) as running, httpx.Client(base_url=running.url, timeout=300) as made:
        yield made


def answer(http: httpx.Client, **more: Any) -> dict[str, Any]:
    response = http.post(PATH, json={**BASE, **more})
    assert response.status_code == 200, response.text
    TypeAdapter(Message).validate_python(response.json())
    message: dict[str, Any] = response.json()
    return message


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    found = [json.loads(event.partition("\ndata: ")[2]) for event in events]
    assert found[0]["type"] == "message_start"
    return [event for event in found if event["type"] != "ping"]


def error_of(response: httpx.Response, status: int) -> dict[str, str]:
    assert response.status_code == status, response.text
    TypeAdapter(AnthropicErrorBody).validate_python(response.json())
    error: dict[str, str] = response.json()["error"]
    return error


def test_an_answer_is_the_chats_and_any_name_means_the_model(http: httpx.Client) -> None:
    message = answer(http)
    assert message["content"] == [{"type": "text", "text": "7 + 5 = 12"}]
    assert (message["stop_reason"], message["model"]) == ("end_turn", "claude-opus-5-5")
    chat = http.post("/v1/chat/completions", json={**BASE, "model": MODEL}).json()
    assert chat["choices"][0]["message"]["content"] == message["content"][0]["text"]
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]


def test_a_stream_is_the_answer_in_pieces(http: httpx.Client) -> None:
    first, start, *deltas, stop, delta, last = events_of(http.post(f"{PATH}?beta=true", json={**BASE, "stream": True}))
    kinds = [start["type"], stop["type"], delta["type"], last["type"]]
    assert kinds == ["content_block_start", "content_block_stop", "message_delta", "message_stop"]
    assert "".join(each["delta"]["text"] for each in deltas) == answer(http)["content"][0]["text"]
    assert first["message"]["id"].startswith("msg-") and delta["delta"]["stop_reason"] == "end_turn"
    usage = delta["usage"]
    assert http.post(COUNT, json={"messages": SUM}).json() == {
        "input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]
    }


def test_calls_and_their_results(http: httpx.Client) -> None:
    message = answer(http, messages=WEATHER, tools=[TOOL])
    (call,) = message["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", {"city": "Porto"})
    assert message["stop_reason"] == "tool_use"
    events = events_of(http.post(PATH, json={**BASE, "messages": WEATHER, "tools": [TOOL], "stream": True}))
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == call["input"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "Sunny.", "is_error": False}
    history = [*WEATHER, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": [result]}]
    assert answer(http, messages=history, tools=[TOOL], max_tokens=5)["content"]
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}):
        (forced,) = answer(http, messages=SUM, tools=[TOOL], tool_choice=choice)["content"]
        assert forced["type"] == "tool_use"
    none = answer(http, messages=WEATHER, tools=[TOOL], tool_choice={"type": "none"})
    assert [block["type"] for block in none["content"]] == ["text"]


def test_a_schema_is_satisfied(http: httpx.Client) -> None:
    config = {"effort": "high", "format": {"type": "json_schema", "schema": PERSON}}
    (block,) = answer(http, messages=EXTRACT, output_config=config)["content"]
    assert json.loads(block["text"]) == {"name": "Mia", "age": 34}


def test_what_is_not_enforced_is_told_in_the_words_of_each_api(http: httpx.Client) -> None:
    loose = {"type": "json_schema", "schema": {**PERSON, "uniqueItems": True}}
    for path, body, field in (
        (PATH, {**BASE, "output_config": {"format": loose}}, "output_config.format"),
        ("/v1/responses", {"input": "Hi", "text": {"format": {**loose, "name": "x"}}}, "text.format"),
        ("/v1/chat/completions", {"messages": SUM, "format": loose["schema"]}, "format"),
    ):
        assert http.post(path, json=body).headers["x-ignored-fields"] == f"{field}: #/uniqueItems"


def test_how_an_answer_ends(http: httpx.Client) -> None:
    stopped = answer(http, stop_sequences=["="])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "=")
    assert stopped["content"] == [{"type": "text", "text": "7 + 5 "}]
    assert answer(http, max_tokens=2)["stop_reason"] == "max_tokens"
    story = [{"role": "user", "content": LONG[0]["content"][:54]}]
    draws = [answer(http, messages=story, temperature=2, seed=seed, max_tokens=9)["content"] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    begun = [*SUM, {"role": "assistant", "content": "7 + 5"}]
    assert answer(http, messages=begun)["content"] == [{"type": "text", "text": " = 12"}]
    # as much as Claude Code asks for: it is cut to the room in the context
    assert answer(http, max_tokens=128_000)["stop_reason"] == "end_turn"


def test_what_is_in_the_prefix_cache_is_told(http: httpx.Client) -> None:
    http.post("/reset_prefix_cache")
    story = [{"role": "user", "content": "Tell me a story about a fox named Anna in the forest. " * 5}]
    first, second = (answer(http, messages=story, max_tokens=1)["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] == 0
    assert second["cache_read_input_tokens"] > 0
    assert second["cache_read_input_tokens"] + second["input_tokens"] == first["input_tokens"]


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_requests_are_answered(http: httpx.Client, name: str) -> None:
    recorded = RECORDED[name]
    body = {**recorded["body"], "max_tokens": 3} if "count_tokens" not in recorded["path"] else recorded["body"]
    response = http.post(recorded["path"], json=body, headers=recorded["headers"])
    if body.get("stream"):
        assert events_of(response)[-1] == {"type": "message_stop"}
    else:
        assert response.status_code == 200, response.text
    told = response.headers.get("x-ignored-fields", "")
    # the embedded model has no reasoning that an effort or a budget could change
    assert {field for field in told.split(", ") if field} <= {
        *IGNORED,
        "output_config.effort",
        "thinking.budget_tokens",
    }


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "this model takes no images, audio, video or files: it takes text only",
        ),
        ({"messages": [{"role": "user", "content": [{**CALL, "name": 5}]}]}, "messages[0].content[0].name"),
        ({"messages": [{"role": "user", "content": [{"type": []}]}]}, "messages[0].content[0]"),
        ({"messages": [*SUM, {"role": "assistant", "content": [CALL] * 513}]}, "messages: too many tool_calls"),
        ({"system": 5}, "system"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"stop_sequences": ["x"] * 1000}, "stop_sequences"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"tools": [{"name": ""}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": [TOOL] * 513}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice names 'other'"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config.format: "),
        ({"model": ""}, "model"),
    ],
)
def test_wrong_fields_are_named(http: httpx.Client, more: dict[str, Any], words: str) -> None:
    for path in (PATH, COUNT) if more.keys() & {"messages", "system", "tools"} else (PATH,):
        error = error_of(http.post(path, json={**BASE, **more}), 400)
        assert error["type"] == "invalid_request_error"
        assert words in error["message"], error


def test_other_errors(http: httpx.Client) -> None:
    assert error_of(http.get(PATH), 405)["type"] == "invalid_request_error"
    assert error_of(http.post(f"{PATH}/batches", json={}), 404)["type"] == "not_found_error"
    assert error_of(http.post(PATH, content=b"{}", headers={"content-type": "text/plain"}), 415)
    assert error_of(http.post(PATH, content=b"{", headers={"content-type": "application/json"}), 400)
    version = {"anthropic-version": "2023-06-01"}
    assert error_of(http.get("/v1/models/claude-opus-5-5", headers=version), 404)["type"] == "not_found_error"


@pytest.mark.parametrize("times", [1, 50])
def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(
    http: httpx.Client, times: int
) -> None:
    """A very long text is refused before it is tokenised."""
    longer = [{**LONG[0], "content": LONG[0]["content"] * times}]
    for stream in (False, True):
        error = error_of(http.post(PATH, json={**BASE, "messages": longer, "stream": stream}), 400)
        words = error["message"].split()
        assert words[:4] + words[5:7] + words[8:] == ["prompt", "is", "too", "long:", "tokens", ">", "maximum"]
        assert int(words[4]) > int(words[7]) == 2047


def test_models_are_what_both_clients_read(http: httpx.Client) -> None:
    models = http.get("/v1/models", params={"limit": 1000}).json()
    assert (models["object"], models["has_more"], models["first_id"], models["last_id"]) == (
        "list",
        False,
        MODEL,
        MODEL,
    )
    (card,) = models["data"]
    assert (card["object"], card["type"], card["display_name"], card["max_input_tokens"]) == (
        "model",
        "model",
        MODEL,
        2048,
    )
    assert http.get(f"/v1/models/{MODEL}").json() == card


def test_strict_names_strict_fields_and_a_key() -> None:
    settings = ServerSettings(
        served_model_names=(MODEL,),
        strict_model_names=True,
        strict_fields=True,
        api_keys=("first-key-1",),
        access_log="off",
    )
    with running_server(settings=settings) as running, httpx.Client(base_url=running.url, timeout=300) as http:
        assert error_of(http.post(PATH, json=BASE), 401)["type"] == "authentication_error"
        http.headers["x-api-key"] = "first-key-1"
        for path, asked in ((PATH, BASE), (COUNT, {"messages": SUM, "model": "claude-opus-5-5"})):
            error = error_of(http.post(path, json=asked), 404)
            assert (error["type"], MODEL in error["message"]) == ("not_found_error", True)
        body = {**BASE, "model": MODEL, "max_tokens": 1}
        assert http.post(PATH, json=body).status_code == 200
        assert "safeguards" in error_of(http.post(PATH, json={**body, "safeguards": []}), 400)["message"]
        search = {"type": "web_search_20250305", "name": "web_search"}
        for path in (PATH, COUNT):  # a tool that is not served is no unknown field
            response = http.post(path, json={**(body if path == PATH else {"messages": SUM}), "tools": [search]})
            assert response.status_code == 200, response.text
            assert response.headers["x-ignored-fields"] == "tools[] (web_search_20250305)"
