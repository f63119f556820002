"""What other engines' clients, and the official one, send beside what this server knows: requests are answered all the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai import OpenAI

from inflight.entrypoints.serve.settings import ServerSettings
from tests.e2e.openai_server import MODEL, RunningServer, running_server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SUM: list[Any] = [{"role": "user", "content": "What is 7 + 5?"}]
WEATHER: list[Any] = [{"role": "user", "content": "How is the weather in Porto?"}]
EXTRACT: list[Any] = [
    {"role": "user", "content": "Extract name and age as JSON: Mia is 34 years old and lives in Oslo."}
]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
# texts are cut to their first words, and few tools are kept
RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("recorded_chats.json").read_text("utf-8"))
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


def tool(strict: bool = False, parameters: object = CITY) -> dict[str, Any]:
    function = {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": parameters,
        "strict": strict,
    }
    return {"type": "function", "function": function}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=300) as made:
        yield made


def chat(http: httpx.Client, messages: list[Any], **more: Any) -> httpx.Response:
    return http.post(CHAT, json={"messages": messages, "temperature": 0, **more})


def message_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


class Person(pydantic.BaseModel):
    name: str
    age: int


class GetWeather(pydantic.BaseModel):
    city: str


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own
def test_the_official_clients_own_messages_come_back(client: OpenAI) -> None:
    """`parse` adds `parsed`, and `parsed_arguments` to calls; the loops in its documentation append the message as it is."""
    parsed = client.chat.completions.parse(model=MODEL, messages=EXTRACT, response_format=Person, temperature=0)
    history: list[Any] = [*EXTRACT, parsed.choices[0].message, *SUM]
    assert client.chat.completions.create(model=MODEL, messages=history, max_tokens=5).choices[0].message.content
    tools = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
    called = client.chat.completions.parse(model=MODEL, messages=WEATHER, tools=tools, temperature=0)
    (call,) = called.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(city="Porto")
    history = [*WEATHER, called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}]
    assert client.chat.completions.parse(model=MODEL, messages=history, tools=tools).choices


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_fields_that_are_not_known_are_told(http: httpx.Client, path: str, stream: bool) -> None:
    asked = {"messages": SUM} if path == CHAT else {"prompt": "x"}
    body = {**asked, "max_tokens": 2, "temperature": 0, "stream": stream}
    plain, odd = http.post(path, json=body), http.post(path, json={**body, "frobnicate": {"a": 1}, "nothing": None})
    assert "x-ignored-fields" not in plain.headers
    assert (odd.status_code, odd.headers["x-ignored-fields"]) == (200, "frobnicate")
    if not stream:
        assert odd.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_requests_of_real_programs_are_answered(http: httpx.Client, name: str) -> None:
    body = {**RECORDED[name], "model": MODEL, "max_tokens": 3, "max_completion_tokens": 3}
    response = http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers
    if body.get("stream"):
        *chunks, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        reasons = [choice["finish_reason"] for chunk in map(json.loads, chunks) for choice in chunk["choices"]]
        assert done == "[DONE]" and reasons[-1] in ("length", "stop")


def test_so_are_those_of_the_endpoints_for_tokens(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": "x", "odd": 1})
    assert tokens.headers["x-ignored-fields"] == "odd"
    text = http.post("/detokenize", json={"tokens": tokens.json()["tokens"], "odd": 1})
    assert (text.headers["x-ignored-fields"], text.json()) == ("odd", {"prompt": "x"})


def test_strict_fields_refuse_them() -> None:
    with (
        running_server(settings=ServerSettings(strict_fields=True)) as running,
        httpx.Client(base_url=running.url, timeout=300) as http,
    ):
        for path, asked in ((CHAT, {"messages": SUM}), (TEXT, {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
            response = http.post(path, json={**asked, "frobnicate": 1})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "frobnicate")
            assert http.post(path, json={**asked, "frobnicate": None}).status_code == 200


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "response_format", [{"type": "json_object"}, JSON_SCHEMA, {"type": "json_object", "schema": PERSON}]
)
def test_a_call_or_the_json_comes(http: httpx.Client, strict: bool, response_format: dict[str, Any]) -> None:
    more = {"tools": [tool(strict)], "response_format": response_format, "max_tokens": 80}
    called = message_of(chat(http, WEATHER, **more))
    assert [json.loads(call["function"]["arguments"]) for call in called["tool_calls"]] == [{"city": "Porto"}]
    answered = message_of(chat(http, EXTRACT, **more))
    assert json.loads(answered["content"])["name"] == "Mia"
    assert "tool_calls" not in answered
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        assert message_of(chat(http, EXTRACT, tool_choice=choice, **more))["tool_calls"]


@pytest.mark.parametrize(
    "arguments", ['{"oops', '{"city": "', "no JSON", "[1]", '{"a": "\\ud800"}', "", None, {"city": "Porto"}]
)
def test_arguments_of_any_kind_come_back(http: httpx.Client, arguments: object) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    history = [*WEATHER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    history.append({"role": "tool", "tool_call_id": "c", "content": "Sunny."})
    assert message_of(chat(http, history, tools=[tool()], max_tokens=5))


@pytest.mark.parametrize("stream", [False, True])
def test_every_cut_of_a_call_shows_a_call_or_its_beginning_and_comes_back(http: httpx.Client, stream: bool) -> None:
    for max_tokens in range(1, 40):
        response = chat(http, WEATHER, tools=[tool()], max_tokens=max_tokens, stream=stream)
        if stream:
            events = [json.loads(event[6:]) for event in response.text.split("\n\n")[:-2]]
            deltas = [choice["delta"] for event in events for choice in event["choices"]]
            content = "".join(delta.get("content") or "" for delta in deltas)
            has_call = any("tool_calls" in delta for delta in deltas)
        else:
            message = message_of(response)
            content, has_call = message["content"] or "", "tool_calls" in message
            if max_tokens % 7 == 0:
                assert message_of(chat(http, [*WEATHER, message, *SUM], tools=[tool()], max_tokens=1))
        assert not (has_call and content), (max_tokens, content)


ODD = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "format": "city"},
        "tags": {"type": "array", "items": {"type": "integer", "format": "int32"}, "uniqueItems": True, "maxItems": 2},
        "record": {"type": "object", "propertyNames": {"type": "string"}, "maxProperties": 1},
    },
    "required": ["city"],
    "additionalProperties": False,
    "not": {"required": ["x"]},
}


def test_schemas_of_other_libraries_are_taken_and_what_is_not_enforced_is_told(http: httpx.Client) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named, "auto"):
        response = chat(http, WEATHER, tools=[tool(parameters=ODD)], tool_choice=choice, max_tokens=120)
        assert json.loads(message_of(response)["tool_calls"][0]["function"]["arguments"])["city"]
        told = response.headers.get("x-ignored-fields", "")
        assert ("tools[0] ('get_weather'): #/not" in told) == (choice != "auto")
        assert ("#/properties/tags/uniqueItems" in told) == (choice != "auto")
    response = chat(http, WEATHER, tools=[tool(True, ODD)])
    error = response.json()["error"]
    assert (response.status_code, error["message"][:56]) == (
        400,
        "tools[0] ('get_weather'): #/not is not supported; leave ",
    )
    strict = {key: value for key, value in ODD.items() if key != "not"}
    assert (
        chat(http, WEATHER, tools=[tool(True, strict)], max_tokens=3).headers["x-ignored-fields"].count("format") == 2
    )
    loose = {"type": "json_schema", "json_schema": {"name": "n", "schema": ODD}}
    assert "response_format: #/not" in chat(http, SUM, response_format=loose, max_tokens=3).headers["x-ignored-fields"]


def test_openais_own_values_are_taken(http: httpx.Client) -> None:
    more = {
        "store": True, "verbosity": "low", "service_tier": "flex", "top_logprobs": 0, "metadata": {"a": "b"},
        "prediction": {"type": "content", "content": "x"}, "prompt_cache_retention": "24h", "parallel_tool_calls": True,
        "stream_options": None, "tools": None, "response_format": None, "stop": None, "logit_bias": None, "n": None,
    }  # fmt: skip
    plain, same = chat(http, SUM), chat(http, SUM, **more)
    assert message_of(same) == message_of(plain)
    assert "x-ignored-fields" not in same.headers


def test_a_stream_has_a_chunk_for_every_token(http: httpx.Client) -> None:
    """Also for those without a text: parts of characters."""
    pieces = http.post("/tokenize", json={"prompt": "東"}).json()["tokens"]
    assert len(pieces) > 1
    body = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "stream": True, "allowed_token_ids": pieces[:1]}
    for path, asked, extra in ((TEXT, {"prompt": "x"}, 0), (CHAT, {"messages": SUM}, 1)):
        text = http.post(path, json={**asked, **body}).text
        events = [json.loads(event[6:]) for event in text.split("\n\n")[:-2]]
        assert len(events) >= 3 + extra, text  # on a busy machine tokens that nobody has read yet are merged


def test_tokenizer_info(http: httpx.Client) -> None:
    info = http.get("/tokenizer_info").json()
    assert info["eos_token"] and info["chat_template"] and info["model_max_length"] == 2048
