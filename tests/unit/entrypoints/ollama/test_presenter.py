"""Answers of /api/chat and /api/generate: the lines of a stream, and the same content as one object."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from inflight.entrypoints.http.errors import to_api_error
from inflight.entrypoints.http.presenter import AnswerTo
from inflight.entrypoints.ollama.bodies import ChatAnswer, GeneratedText
from inflight.entrypoints.ollama.presenter import OllamaChatPresenter, OllamaPresenter, OllamaTextPresenter
from inflight.errors import EngineClosedError, RequestTimeoutError
from inflight.outputs import CompletionOutput, RequestMetrics
from tests.unit.entrypoints.anthropic.test_presenter import ANSWERS, CALL, _joined, parsed
from tests.unit.entrypoints.outputs import completion, output, request

TIMES = RequestMetrics(arrival_time=1.0, first_scheduled_time=1.5, first_token_time=3.5, finished_time=7.5)
COUNTS = {"total_duration": 6_500_000_000, "load_duration": 500_000_000, "prompt_eval_duration": 2_000_000_000,
          "eval_duration": 4_000_000_000, "prompt_eval_count": 3}  # fmt: skip


def presenter(kind: type[OllamaPresenter] = OllamaChatPresenter) -> OllamaPresenter:
    return kind(AnswerTo("ollama-1", request(stream=True), "fp", None))


def streamed(outputs: list[CompletionOutput], shown: OllamaPresenter | None = None) -> list[dict[str, Any]]:
    shown = shown or presenter()
    *first, last = [output(each) for each in outputs]
    data = b"".join(chunk for each in (*first, replace(last, metrics=TIMES)) for chunk in shown.chunks(0, each))
    *lines, rest = (data + shown.end()).split(b"\n")
    assert rest == b""
    return [json.loads(line) for line in lines]


def whole(outputs: list[CompletionOutput], shown: OllamaPresenter | None = None) -> dict[str, Any]:
    joined = replace(output(*_joined(outputs)), metrics=TIMES)
    answer: dict[str, Any] = json.loads((shown or presenter()).body([joined]))
    return answer


def collected(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that a client makes of the lines."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for line in lines:
        TypeAdapter(ChatAnswer).validate_python(line)
        assert line["done"] is (line is lines[-1])
        for name, value in line["message"].items():
            message[name] = value if name == "role" else message.get(name, type(value)()) + value
    return {**lines[-1], "message": message}


@pytest.mark.parametrize("text", ANSWERS)
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_stream_is_the_body_in_pieces(text: str, size: int) -> None:
    found = collected(streamed(parsed([text[i : i + size] for i in range(0, len(text), size)], "stop")))
    answer = whole(parsed([text], "stop"))
    TypeAdapter(ChatAnswer).validate_python(answer)
    assert {**found, "created_at": ""} == {**answer, "created_at": ""}


def test_thought_text_and_calls_with_their_counts() -> None:
    answer = whole(parsed([f"<think>Hm.</think>\n\nLook:\n{CALL}"], "stop"))
    call = {"id": "id", "function": {"name": "f", "arguments": {"a": 1}}}
    assert answer["message"] == {"role": "assistant", "content": "Look:", "thinking": "Hm.", "tool_calls": [call]}
    assert (answer["model"], answer["done_reason"]) == ("m", "stop")
    assert {name: answer[name] for name in COUNTS} == COUNTS
    assert answer["eval_count"] == len(f"<think>Hm.</think>\n\nLook:\n{CALL}")


def test_each_call_has_its_own_arguments() -> None:
    calls = parsed([f"{CALL}\n{CALL.replace('1', '2')}"], "stop")
    for answer in (whole(calls), collected(streamed(calls))):
        assert [call["function"]["arguments"] for call in answer["message"]["tool_calls"]] == [{"a": 1}, {"a": 2}]


def test_the_answers_of_generate() -> None:
    lines = streamed([completion("Hi"), completion("!", finish_reason="length")], presenter(OllamaTextPresenter))
    assert [line["response"] for line in lines] == ["Hi", "!", ""]
    assert [line.get("done_reason") for line in lines] == [None, None, "length"]
    thinking = whole(parsed(["<think>Hm.</think>\n\nHi."], "stop"), presenter(OllamaTextPresenter))
    assert (thinking["thinking"], thinking["response"]) == ("Hm.", "Hi.")
    for line in (*lines, thinking):
        TypeAdapter(GeneratedText).validate_python(line)


def test_a_cut_call_has_its_arguments_as_they_were_written() -> None:
    cut = parsed([CALL[: CALL.index("1")].replace('"a": ', '"a": "b')], "length")
    for answer in (whole(cut), collected(streamed(cut))):
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["arguments"] == {"INVALID_JSON": '{"a": "b'}
        assert answer["done_reason"] == "length"


def test_a_stream_that_waits_sends_a_piece_without_text() -> None:
    shown = presenter()
    line = json.loads(shown.keep_alive())
    assert (line["message"], line["done"]) == ({"role": "assistant", "content": ""}, False)
    assert collected([line, *streamed(parsed(["Hi"], "stop"), shown)])["message"]["content"] == "Hi"


def test_failures_are_lines() -> None:
    shown = presenter()
    with pytest.raises(EngineClosedError):
        shown.chunks(0, output(completion("Hi", finish_reason="abort")))
    assert shown.failure(to_api_error(RequestTimeoutError("too slow"))) == b'{"error": "too slow"}\n'
