"""/v1/responses: the official `openai` client, requests that real programs have sent, and what each field does."""

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
from openai.types.responses import Response, ResponseStreamEvent

from inflight.entrypoints.fields.constraint_fields import ConstraintFields
from inflight.entrypoints.fields.strict_model import EFFECT
from inflight.entrypoints.responses_api.protocol import ResponsesRequest
from inflight.entrypoints.serve.settings import ServerSettings
from tests.e2e.openai_server import MODEL, demo_args, running_server
from tests.support.document_rows import row_problems

PATH = "/v1/responses"
# shows what a request can set, but of tools only the names: those of real programs are longer than this model's context
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{{ m.reasoning_content or '' }}"
    "{{ m.tool_calls | tojson if m.tool_calls else '' }}<|im_end|>\n{% endfor %}"
    "{% for tool in tools or () %}{{ tool.function.name }} {% endfor %}{{ reasoning_effort or '' }}{{ mood or '' }}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SUM = "What is 7 + 5?"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
RECORDED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "recorded_responses.json").read_text(encoding="utf-8")
)
# a stream that waits must be kept alive by events, so there are some between the others
SETTINGS = ServerSettings(
    served_model_names=(MODEL, "another-name", "stub-model", "gpt-5.5", "gpt-5.6-terra"),
    access_log="off",
    stream_keep_alive_interval=0.02,
    tool_call_parser="hermes",
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    args = demo_args(chat_template=TEMPLATE, scheduling_policy="priority")
    with running_server(args, SETTINGS) as running:
        yield running.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=300) as made:
        yield made


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    found = [json.loads(event.partition("\ndata: ")[2]) for event in events]
    for event in found:
        if event["type"] != "response.failed":  # the client knows only OpenAI's own codes
            EVENT.validate_python(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


# -- the official client -----------------------------------------------------------------------------------------------


def test_a_response(client: OpenAI) -> None:
    response = client.responses.create(model=MODEL, input=SUM, temperature=0)
    assert response.output_text == "7 + 5 = 12"
    assert (response.status, response.model) == ("completed", MODEL)
    assert response.usage is not None and response.usage.total_tokens > 10
    cut = client.responses.create(model=MODEL, input=SUM, temperature=0, max_output_tokens=2)
    assert cut.incomplete_details is not None
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_stream_ends_with_the_same_response(client: OpenAI) -> None:
    with client.responses.stream(model=MODEL, input=SUM, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert events[0].type == "response.created"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "7 + 5 = 12"
    assert final.output_text == "7 + 5 = 12"
    assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})


def test_a_tool_is_called_and_its_result_is_read(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "tools": [WEATHER], "temperature": 0}
    history: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    whole: Any = client.responses.create(**asked, input=history, tool_choice="required")
    with client.responses.stream(**asked, input=history, tool_choice="required") as stream:
        streamed: Any = stream.get_final_response()
    for response in (whole, streamed):
        call = response.output[-1]
        assert call.type == "function_call"
        assert (call.name, call.status) == ("get_weather", "completed")
        assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    history += [*whole.output, {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    answer = client.responses.create(**asked, input=history, max_output_tokens=5)
    assert answer.usage.input_tokens > 20


def test_a_schema(client: OpenAI) -> None:
    class Sum(pydantic.BaseModel):
        total: int

    response = client.responses.parse(model=MODEL, input=SUM, text_format=Sum, temperature=0, max_output_tokens=50)
    assert isinstance(response.output_parsed, Sum)


def test_a_custom_tool_with_a_regex(client: OpenAI) -> None:
    tool: Any = {
        "type": "custom",
        "name": "pick",
        "format": {"type": "grammar", "syntax": "regex", "definition": "cat|dog"},
    }
    space: Any = {"type": "namespace", "name": "pets", "description": "d", "tools": [tool]}
    response = client.responses.create(
        model=MODEL, input="Pick one.", tools=[space], tool_choice="required", parallel_tool_calls=False, temperature=0
    )
    (call,) = response.output
    assert call.type == "custom_tool_call"
    assert (call.name, call.namespace) == ("pick", "pets")
    assert call.input in ("cat", "dog")


def test_input_tokens_are_those_of_the_prompt(client: OpenAI) -> None:
    counted = client.responses.input_tokens.count(model=MODEL, input=SUM, instructions="Be short.")
    response = client.responses.create(model=MODEL, input=SUM, instructions="Be short.", max_output_tokens=1)
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens


def test_logprobs(client: OpenAI) -> None:
    response = client.responses.create(model=MODEL, input=SUM, temperature=0, top_logprobs=2)
    (message,) = response.output
    assert message.type == "message" and message.content[0].type == "output_text"
    logprobs = message.content[0].logprobs or []
    assert "".join(entry.token for entry in logprobs).startswith("7 + 5 = 12")
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)


# -- real programs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(RECORDED))
def test_recorded_requests_are_served(http: httpx.Client, name: str) -> None:
    asked = {**RECORDED[name], "max_output_tokens": 8, "temperature": 0}
    response = http.post(PATH, json=asked)
    ignored = set(response.headers.get("x-ignored-fields", "").split(", ")) - {""}
    assert ignored <= {"tools[] (web_search)", "tools[] ('apply_patch'): format.definition",
                       "tools[] ('exec'): format.definition"}  # fmt: skip
    if not asked.get("stream"):
        assert response.json()["status"] == "incomplete"
        return
    events = events_of(response)
    kinds = [event["type"].removeprefix("response.") for event in events if event["type"] != "response.in_progress"]
    assert kinds[0] == "created" and kinds[-1] in ("completed", "incomplete")
    assert kinds[1] == "output_item.added"
    assert events[1]["type"] == "response.in_progress"
    final = events[-1]["response"]
    Response.model_validate(final)
    assert final["store"] is False
    # without the tools of OpenAI's servers
    served = ("function", "custom", "namespace", "tool_search")
    expected = [tool["type"] for tool in asked.get("tools", ()) if tool["type"] in served]
    assert [tool["type"] for tool in final["tools"]] == expected


# -- errors ------------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "text only"),
    ({"input": [{"type": "nothing"}]}, "input", "no message"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "required"),
    ({"input": []}, "input", "at least 1 item"),
    ({"input": 5}, "input", "valid"),
    ({"input": "word " * 3000}, "input", "maximum context length"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "required"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": 5}]}]}, "tools[0].tools[0]", "type"),
    ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice.type", "the server runs no tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "'g'"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": [{**WEATHER, "parameters": {"type": "object", "not": {}}}]}, "tools[0]", "get_weather"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "required"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}, "strict": True}}}, "text.format", "not"),
    ({"background": True, "store": False}, "background", "stored"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ({"temperature": "hot"}, "temperature", "valid number"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "words"), REFUSED, ids=[case[1] for case in REFUSED])
def test_what_is_wrong_is_named(http: httpx.Client, body: dict[str, Any], param: str, words: str) -> None:
    response = http.post(PATH, json={"input": "x", **body})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert error["code"] == ("context_length_exceeded" if "context length" in words else None)


def test_a_failure_in_mid_stream_is_a_failed_response(http: httpx.Client) -> None:
    schema = {"type": "string", "pattern": "^((.{1,60} ){1,60}[a-z]{1,60}){1,60}x$"}
    body = {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}}
    created, *_, failed = events_of(http.post(PATH, json={**body, "stream": True}))
    assert (created["type"], failed["type"]) == ("response.created", "response.failed")
    error = failed["response"]["error"]
    assert error["code"] == "invalid_request_error"
    assert "too complex" in error["message"]


def test_what_is_not_there(client: OpenAI, http: httpx.Client) -> None:
    with pytest.raises(openai.NotFoundError, match="'resp_1' not found"):
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError, match="'resp_1' not found"):
        client.responses.retrieve("resp_1")
    assert http.post(f"{PATH}/resp_1/cancel").status_code == 404
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.responses.create(model="gpt-9", input="x")


# -- fields ------------------------------------------------------------------------------------------------------------

BASE: dict[str, Any] = {"input": SUM, "temperature": 0, "max_output_tokens": 12}
DRAWN = {"temperature": 2.0, "seed": 1}
HOT = {"temperature": 50.0, "seed": 1}
WILD = {"temperature": 10.0, "seed": 2}  # more than one call
LONGER = {"temperature": 1.5, "seed": 2, "max_output_tokens": 60, "input": "Tell me a story about a fox."}
# field -> what is sent beside it, its value. The outcome differs from that without the field.
FIELDS: dict[str, tuple[dict[str, Any], Any]] = {
    "model": ({}, "another-name"),
    "input": ({}, "What is 1 + 1?"),
    "instructions": ({}, "Be short."),
    "tools": ({}, [WEATHER]),
    "tool_choice": ({"tools": [WEATHER]}, "required"),
    "parallel_tool_calls": ({"tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 120, **WILD}, False),
    "temperature": ({"seed": 1}, 30.0),
    "top_p": (HOT, 0.01),
    "top_k": (HOT, 1),
    "min_p": (DRAWN, 1.0),
    "presence_penalty": (LONGER, 2.0),
    "frequency_penalty": (LONGER, 2.0),
    "seed": ({"temperature": 50.0}, 3),
    "max_output_tokens": ({"max_output_tokens": None}, 2),
    "text": ({}, {"format": {"type": "json_object"}}),
    "reasoning": ({}, {"effort": "high"}),
    "top_logprobs": ({"include": ["message.output_text.logprobs"]}, 2),
    "include": ({}, ["message.output_text.logprobs"]),
    "stream": ({}, True),
    "chat_template_kwargs": ({}, {"mood": "sad"}),
}
# fields that no outcome of one request shows; they have tests of their own
SHOWN_ELSEWHERE = {"cache_salt", "priority", "previous_response_id", "store", "background"}
# those of tests/unit/entrypoints/fields/test_constraint_fields.py
SHOWN_ELSEWHERE |= ConstraintFields.model_fields.keys() - FIELDS.keys() - {"use_beam_search", "logits_processors"}
NONE: dict[str, Any] = {  # fields that change nothing: a value that is accepted
    "stream_options": {"include_obfuscation": False}, "truncation": "auto",
    "max_tool_calls": 3, "metadata": {"a": "b"}, "client_metadata": {"a": "b"}, "user": "u", "safety_identifier": "s",
    "prompt_cache_key": "k", "prompt_cache_retention": "24h", "service_tier": "auto", "use_beam_search": False,
    "logits_processors": [],
}  # fmt: skip


def effect(name: str) -> str | None:
    extra = ResponsesRequest.model_fields[name].json_schema_extra
    assert extra is None or isinstance(extra, dict)
    return (extra or {}).get(EFFECT)  # type: ignore[return-value]


def outcome(http: httpx.Client, body: dict[str, Any]) -> object:
    """What the model has done, without what the response repeats of the request."""
    response = http.post(PATH, json={**BASE, **body})
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        return "stream"
    found = response.json()
    for item in found["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return found["output"], found["model"], found["status"], found["usage"]["input_tokens"]


def test_every_field_has_a_case() -> None:
    without_effect = {name for name in ResponsesRequest.model_fields if effect(name) is not None}
    cases, with_effect = set(FIELDS) | SHOWN_ELSEWHERE, set(ResponsesRequest.model_fields) - without_effect
    assert cases == with_effect, (
        f"without a case in FIELDS of this file: {with_effect - cases}; with a case, but without effect or no field: "
        f"{cases - with_effect}"
    )
    assert set(NONE) <= without_effect


@pytest.mark.parametrize("name", list(FIELDS))
def test_a_field_changes_the_outcome(http: httpx.Client, name: str) -> None:
    beside, value = FIELDS[name]
    assert outcome(http, {**beside, name: value}) != outcome(http, beside)


def test_a_field_without_effect_has_none(http: httpx.Client) -> None:
    names = [name for name in ResponsesRequest.model_fields if effect(name) is not None]
    assert outcome(http, {name: NONE.get(name) for name in names}) == outcome(http, {})


def test_a_salt_and_a_priority(http: httpx.Client) -> None:
    body = {"input": " ".join(map(str, range(60))), "max_output_tokens": 1, "priority": -3}

    def cached(salt: str) -> int:
        usage = http.post(PATH, json={**body, "cache_salt": salt}).json()["usage"]
        return int(usage["input_tokens_details"]["cached_tokens"])

    assert cached("a") == 0
    assert cached("a") > 0
    assert cached("b") == 0


DOCUMENT = Path(__file__).parents[2] / "docs" / "responses-api.md"


def test_the_document_lists_every_field() -> None:
    before = {None: "", "none": "no effect: ", "neutral": "neutral value only: "}
    fields = sorted(ResponsesRequest.model_fields.items())
    rows = [f"| `{name}` | {before[effect(name)]}{field.description} |" for name, field in fields]
    assert not (problems := row_problems(DOCUMENT, ["| field | |", "|---|---|"], rows)), problems
