"""Answers of /v1/messages: the events in their order, and the same content as one body."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from inflight.entrypoints.anthropic.bodies import Message
from inflight.entrypoints.anthropic.presenter import SIGNATURE, MessagesPresenter
from inflight.entrypoints.http.errors import to_api_error
from inflight.entrypoints.http.presenter import AnswerTo
from inflight.errors import EngineClosedError, RequestTimeoutError
from inflight.outputs import CompletionOutput
from inflight.parsers.output_parser import OutputParser
from inflight.parsers.selector import create_output_parser
from inflight.sampling_params import SamplingParams
from tests.unit.entrypoints.outputs import completion, output, request
from tests.unit.parsers.parser_cases import with_ids

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def make_parser() -> OutputParser:
    return with_ids(create_output_parser("hermes", "qwen3", tools=[{"function": {"name": "f"}}]), lambda: "id")


ANSWERS = [
    "Hi there.",
    "<think>Hm.</think>\n\nHi.",
    f"<think>Hm.</think>\n\n{CALL}",
    f"Look:\n{CALL}\n{CALL}",
    "<think>Only a thought",
    "",
]


def presenter(max_tokens: int | None = None, *, reasoning: bool = True) -> MessagesPresenter:
    made = request(stream=True)
    shown = replace(made.presentation, reasoning=reasoning)
    asked = replace(made, presentation=shown, params=SamplingParams(max_tokens=max_tokens))
    return MessagesPresenter(AnswerTo("msg-1", asked, "fp", None))


def parsed(pieces: list[str], reason: str, **more: Any) -> list[CompletionOutput]:
    """The outputs of the engine for a choice with a parser."""
    parser = make_parser()
    found = [completion("", len(piece), events=parser.push(piece)) for piece in pieces]
    last = completion("", 0, events=parser.finish(is_cut=reason != "stop"), finish_reason=reason, **more)
    return [*found, last]


def events_of(data: bytes) -> list[dict[str, Any]]:
    *events, rest = data.decode().split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        name, text = event.split("\n")
        found.append(json.loads(text.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def streamed(shown: MessagesPresenter, outputs: list[CompletionOutput], **more: Any) -> list[dict[str, Any]]:
    data = b"".join(chunk for each in outputs for chunk in shown.chunks(0, output(each, **more)))
    return events_of(data + shown.end())


def collected(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the events. The order of events is that of Anthropic's documentation."""
    first, *middle, delta, last = events
    assert (first["type"], delta["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    message: dict[str, Any] = first["message"]
    TypeAdapter(Message).validate_python(message)
    assert (message["content"], message["stop_reason"]) == ([], None)
    open_block: dict[str, Any] | None = None
    text = ""
    for event in middle:
        if event["type"] == "content_block_start":
            assert open_block is None and event["index"] == len(message["content"])
            open_block, text = event["content_block"], ""
            message["content"].append(open_block)
            continue
        assert open_block is not None and event["index"] == len(message["content"]) - 1
        if event["type"] == "content_block_stop":
            if open_block["type"] == "tool_use":
                open_block["input"] = json.loads(text)
            open_block = None
            continue
        assert event["type"] == "content_block_delta"
        (field,) = event["delta"].keys() - {"type"}
        kinds = {"text": "text", "thinking": "thinking", "signature": "thinking", "partial_json": "tool_use"}
        assert kinds[field] == open_block["type"]
        if field == "partial_json":
            text += event["delta"][field]
        else:
            open_block[field] += event["delta"][field]
    assert open_block is None
    return {**message, **delta["delta"], "usage": delta["usage"]}


@pytest.mark.parametrize("text", ANSWERS)
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_stream_is_the_body_in_pieces(text: str, size: int) -> None:
    whole = json.loads(presenter().body([output(*_joined(parsed([text], "stop")))]))
    TypeAdapter(Message).validate_python(whole)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert collected(streamed(presenter(), parsed(pieces, "stop"))) == whole


def _joined(outputs: list[CompletionOutput]) -> list[CompletionOutput]:
    """One output with all events, as the engine gives it for an answer that is not streamed."""
    events = [event for each in outputs for event in each.events or ()]
    count = sum(len(each.token_ids) for each in outputs)
    return [completion("", count, events=events, finish_reason=outputs[-1].finish_reason)]


@pytest.mark.parametrize("text", ANSWERS)
@pytest.mark.parametrize("size", [1, 1000])
def test_thoughts_that_nobody_asked_for_are_left_out_and_counted(text: str, size: int) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    shown = collected(streamed(presenter(), parsed(pieces, "stop")))
    hidden = collected(streamed(presenter(reasoning=False), parsed(pieces, "stop")))
    without = [block for block in shown["content"] if block["type"] != "thinking"]
    assert hidden == {**shown, "content": without}
    whole = json.loads(presenter(reasoning=False).body([output(*_joined(parsed([text], "stop")))]))
    assert (whole["content"], whole["usage"]["output_tokens"]) == (without, hidden["usage"]["output_tokens"])


def test_thought_text_and_calls_are_blocks() -> None:
    message = collected(streamed(presenter(), parsed([f"<think>Hm.</think>\n\nLook:\n{CALL}"], "stop")))
    call = {"type": "tool_use", "id": "id", "name": "f", "input": {"a": 1}}
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": SIGNATURE}, {"type": "text", "text": "Look:"}, call
    ]  # fmt: skip
    assert (message["stop_reason"], message["stop_sequence"], message["model"]) == ("tool_use", None, "m")


def test_text_without_a_parser() -> None:
    outputs = [completion("Hi"), completion("", 1), completion("!", finish_reason="stop")]
    message = collected(streamed(presenter(), outputs))
    assert message["content"] == [{"type": "text", "text": "Hi!"}]
    assert message["usage"]["output_tokens"] == 4


@pytest.mark.parametrize(
    ("reason", "stop_reason", "max_tokens", "shown"),
    [
        ("stop", None, None, ("end_turn", None)),
        ("stop", 7, None, ("end_turn", None)),  # a token that ends texts
        ("stop", "END", None, ("stop_sequence", "END")),
        ("length", None, 2, ("max_tokens", None)),
        ("length", None, 3, ("model_context_window_exceeded", None)),
        ("length", None, None, ("model_context_window_exceeded", None)),
    ],
)
def test_how_an_answer_ended(reason: str, stop_reason: Any, max_tokens: int | None, shown: Any) -> None:
    last = completion("Hi", finish_reason=reason, stop_reason=stop_reason)
    message = collected(streamed(presenter(max_tokens), [last]))
    assert (message["stop_reason"], message["stop_sequence"]) == shown
    whole = json.loads(presenter(max_tokens).body([output(last)]))
    assert (whole["stop_reason"], whole["stop_sequence"]) == shown


def test_an_answer_that_the_server_has_ended_is_an_error() -> None:
    shown = presenter()
    with pytest.raises(EngineClosedError) as caught:
        shown.chunks(0, output(completion("Hi", finish_reason="abort")))
    (event,) = events_of(shown.failure(to_api_error(caught.value)))
    assert (event["type"], event["error"]["type"]) == ("error", "overloaded_error")


def test_a_cut_call_has_its_input_as_it_was_written() -> None:
    cut = parsed([CALL[: CALL.index("1")].replace('"a": ', '"a": "b')], "length")
    whole = json.loads(presenter(1000).body([output(*_joined(cut))]))
    assert whole["content"] == [{"type": "tool_use", "id": "id", "name": "f", "input": {"INVALID_JSON": '{"a": "b'}}]
    assert whole["stop_reason"] == "model_context_window_exceeded"


def test_the_usage_tells_what_was_in_the_prefix_cache() -> None:
    first, *_, delta, _ = streamed(presenter(), parsed(["<think>a</think>b"], "stop"), prompt=10, num_cached_tokens=4)
    usage = {"input_tokens": 6, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4}
    assert first["message"]["usage"] == {**usage, "output_tokens": 17, "output_tokens_details": {"thinking_tokens": 0}}
    assert delta["usage"] == first["message"]["usage"]


def test_a_ping_keeps_a_stream_alive_even_before_the_first_token() -> None:
    shown = presenter()
    start, ping = events_of(shown.keep_alive())
    assert (start["type"], ping) == ("message_start", {"type": "ping"})
    assert start["message"]["usage"]["input_tokens"] == 3
    assert events_of(shown.keep_alive()) == [ping]
    assert collected([start, *streamed(shown, parsed(["Hi"], "stop"))])["content"] == [{"type": "text", "text": "Hi"}]


def test_a_failure_in_a_stream_is_an_event() -> None:
    (event,) = events_of(presenter().failure(to_api_error(RequestTimeoutError("too slow"))))
    assert event == {"type": "error", "error": {"type": "timeout_error", "message": "too slow"}}
