"""Responses: their items and the events of a stream, against the types of the official client."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.http.presenter import AnswerTo
from inflight.entrypoints.http.validated import Presentation, TokenPrompt
from inflight.entrypoints.responses_api import bodies
from inflight.entrypoints.responses_api.conversation import ValidatedResponse
from inflight.entrypoints.responses_api.presenter import ResponsesPresenter, input_of
from inflight.entrypoints.responses_api.protocol import ResponsesRequest
from inflight.entrypoints.responses_api.tools import PromptTools
from inflight.outputs import RequestOutput
from inflight.parsers.selector import create_output_parser
from inflight.sampling_params import SamplingParams
from tests.unit.entrypoints.outputs import completion, output, row

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "ns", "description": "d", "tools": [{"type": "function", "name": "g"}]},
    {"type": "web_search"},
    {"type": "local_shell"},
]
PARSER = partial(create_output_parser, "hermes", "qwen3", tools=[{"function": {"name": "f"}}])
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def presenter(top_logprobs: int | None = None, **body: Any) -> ResponsesPresenter:
    asked = ResponsesRequest.model_validate({"input": "x", "tools": TOOLS, **body})
    request = ValidatedResponse(
        prompts=(TokenPrompt([1, 2, 3], None),),
        params=SamplingParams(logprobs=top_logprobs, temperature=0.5),
        presentation=Presentation(model="m", stream=bool(asked.stream)),
        asked=asked,
        tools=PromptTools(asked.tools or (), enforces_patterns=False),
    )
    return ResponsesPresenter(AnswerTo("resp-1", request, "fp", None))


def outputs(pieces: list[str], reason: str = "stop") -> list[RequestOutput]:
    """What the engine says if it has parsed a text that came in pieces."""
    parser = PARSER()
    found = [completion("", 1, events=parser.push(piece), num_reasoning_tokens=0) for piece in pieces]
    found[-1].events = [*(found[-1].events or ()), *parser.finish(is_cut=reason != "stop")]
    found[-1].finish_reason = reason
    return [output(each) for each in found]


def opened(stream: bytes) -> list[dict[str, Any]]:
    """The JSON of events. Each is one that the official client knows."""
    found = []
    for event in stream.decode().removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]:
        name, data = event.split("\n")
        shown = json.loads(data.removeprefix("data: "))
        assert name == f"event: {shown['type']}"
        if shown["type"] != "response.failed":  # the client knows only OpenAI's own codes
            EVENT.validate_python(shown)
        found.append(shown)
    return found


def streamed(pieces: list[str], reason: str = "stop", **body: Any) -> list[dict[str, Any]]:
    shown = presenter(stream=True, **body)
    chunks = [
        shown.opening(),
        *(chunk for each in outputs(pieces, reason) for chunk in shown.chunks(0, each)),
        shown.end(),
    ]
    events = opened(b"".join(chunks))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def whole(text: str, reason: str = "stop", **body: Any) -> dict[str, Any]:
    (each,) = outputs([text], reason)
    response = json.loads(presenter(**body).body([each]))
    Response.model_validate(response, strict=True)
    TypeAdapter(bodies.Response).validate_python(response)
    return dict(response)


def names(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_a_stream_of_all_kinds_of_items() -> None:
    calls = [call("f", '{"a": 1}'), call("patch", '{"input": "x\\ny"}'), call("ns__g", "{}")]
    pieces = ["<think>a", "b</think>", "c", "d", calls[0], "\n", calls[1], "\n", calls[2], ""]
    events = streamed(pieces)
    assert names(events) == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    output = events[-1]["response"]["output"]
    assert output == [event["item"] for event in events if event["type"] == "response.output_item.done"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["id"] for item in output] == [item["id"] for item in added]
    assert [item["status"] for item in added] == ["in_progress"] * 5
    assert [item["status"] for item in output] == ["completed"] * 5
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "ab"}] and output[0]["summary"] == []
    assert output[1]["content"] == [{"type": "output_text", "text": "cd", "annotations": [], "logprobs": []}]
    assert (output[2]["name"], output[2]["arguments"], "namespace" in output[2]) == ("f", '{"a": 1}', False)
    assert (output[3]["type"], output[3]["name"], output[3]["input"]) == ("custom_tool_call", "patch", "x\ny")
    assert (output[4]["name"], output[4]["namespace"], output[4]["arguments"]) == ("g", "ns", "{}")
    for event in events[2:-1]:
        item = output[event["output_index"]]
        assert event.get("item_id", item["id"]) == item["id"]


def test_a_whole_response_is_the_end_of_a_stream() -> None:
    text = "<think>a</think>b" + call("f", "{}")
    final = streamed([text])[-1]["response"]
    found = whole(text)
    for response in (final, found):
        assert response.pop("completed_at") >= response.pop("created_at")
        for item in response["output"]:
            for name in ("id", "call_id"):
                item.pop(name, None)
    assert final == found
    assert found["usage"]["input_tokens"] == 3 and found["usage"]["output_tokens"] == 1


def test_every_member_is_there() -> None:
    response = whole("x", metadata={"a": "b"}, store=True, reasoning={"effort": "low"}, tool_choice="none")
    assert set(response) >= REQUIRED
    assert (response["object"], response["id"], response["status"]) == ("response", "resp-1", "completed")
    assert (response["store"], response["background"], response["truncation"]) == (False, False, "disabled")
    assert (response["temperature"], response["metadata"]) == (0.5, {"a": "b"})
    assert response["top_logprobs"] == 0
    assert (response["reasoning"], response["text"]) == (
        {"effort": "low", "summary": None}, {"format": {"type": "text"}},
    )  # fmt: skip
    assert response["tool_choice"] == "none" and [tool["type"] for tool in response["tools"]] == [
        "function", "custom", "namespace", "local_shell",
    ]  # fmt: skip
    assert response["tools"][0] == {
        "type": "function", "name": "f", "description": None, "parameters": {"type": "object"}, "strict": None,
        "defer_loading": None,
    }  # fmt: skip


# those that the schema of Open Responses (2026-04-24) requires
REQUIRED = set(
    "id object created_at completed_at status incomplete_details model previous_response_id instructions output error tools "
    "tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs temperature "
    "reasoning user usage max_output_tokens max_tool_calls store background service_tier metadata safety_identifier "
    "prompt_cache_key".split()
)


@pytest.mark.parametrize(
    ("reason", "status", "details"),
    [("length", "incomplete", {"reason": "max_output_tokens"}), ("abort", "failed", None)],
)
def test_a_response_that_was_cut(reason: str, status: str, details: object) -> None:
    events = streamed(["<think>a</think>b"], reason)
    for response in (events[-1]["response"], whole("<think>a</think>b", reason)):
        assert (response["status"], response["incomplete_details"], response["completed_at"]) == (status, details, None)
        assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
        assert (response["error"] is not None) is (status == "failed")
    assert events[-1]["type"] == f"response.{status}"


def test_without_text_there_is_an_empty_message() -> None:
    assert names(streamed([""]))[2:6] == [
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
    ]
    (message,) = whole("")["output"]
    assert message["content"][0]["text"] == ""


def test_a_text_without_a_parser_is_a_message() -> None:
    body = json.loads(presenter().body([output(completion("Hi", finish_reason="stop"))]))
    assert body["output"][0]["content"][0]["text"] == "Hi"


def test_a_stream_that_waits_and_fails() -> None:
    shown = presenter(stream=True)
    error = ApiError(400, "too long at 0x7f12", code="context_length_exceeded")
    stream = (
        shown.opening() + shown.keep_alive() + b"".join(shown.chunks(0, output(completion("a")))) + shown.failure(error)
    )
    assert stream.endswith(b"data: [DONE]\n\n")
    events = opened(stream)
    assert names(events) == [
        "created", "in_progress", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "failed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(7))
    response = events[-1]["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "context_length_exceeded", "message": "too long"}


def test_logprobs_belong_to_the_text() -> None:
    thought = completion("", 1, events=PARSER().push("<think>a"), logprobs=[row("t")])
    said = completion("bc", 2, logprobs=[row("b"), row("c")], finish_reason="stop")
    found = json.loads(presenter(0).body([output(said)]))["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in found] == ["b", "c"]
    shown = presenter(0, stream=True)
    events = opened(b"".join([*shown.chunks(0, output(thought)), *shown.chunks(0, output(said)), shown.end()]))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry["token"] for event in deltas for entry in event["logprobs"]] == ["b", "c"]
    assert events[-1]["response"]["output"][1]["content"][0]["logprobs"] == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\"b"}', 'a"b'),
        ('{"input": "cut', "cut"),
        ('{"patch": "other name"}', "other name"),
        ('{"input": 5}', '{"input": 5}'),
        ("no JSON", "no JSON"),
    ],
)
def test_the_input_of_a_custom_tool(arguments: str, text: str) -> None:
    assert input_of(arguments) == text


def test_a_call_of_a_clients_tool_is_one_item_at_its_end() -> None:
    text = "I look." + call("local_shell", '{"command": ["ls"]}') + call("f", "{}")
    shown = presenter(stream=True)
    events = opened(b"".join(chunk for each in outputs(list(text)) for chunk in shown.chunks(0, each)) + shown.end())
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["message", "local_shell_call", "function_call"]
    assert done[1]["action"] == {"type": "exec", "env": {}, "command": ["ls"]}
    assert (done[1]["status"], done[1]["call_id"] != "") == ("completed", True)
    (added,) = [
        event for event in events if event["type"] == "response.output_item.added" and event["output_index"] == 1
    ]
    assert added["item"] == {**done[1], "status": "in_progress"}
    assert events[-1]["response"]["output"] == done
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    whole = json.loads(presenter().body([*outputs([text])]))
    assert [item["type"] for item in whole["output"]] == [item["type"] for item in done]
    assert whole["output"][1]["action"] == done[1]["action"]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_arguments_that_the_client_cannot_run_are_those_of_a_function(reason: str) -> None:
    text = (
        call("local_shell", '{"command": "ls"}')
        if reason == "stop"
        else '<tool_call>\n{"name": "local_shell", "arguments": {"command": ["rm", "x'
    )
    shown = presenter(stream=True)
    events = opened(
        b"".join(chunk for each in outputs(list(text), reason) for chunk in shown.chunks(0, each)) + shown.end()
    )
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["name"]) == ("function_call", "local_shell")
    assert item["arguments"] == ('{"command": "ls"}' if reason == "stop" else '{"command": ["rm", "x')
    assert item["status"] == ("completed" if reason == "stop" else "incomplete")
