"""Answers of chats: choices, deltas, tool calls, and how a choice ended."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from inflight.entrypoints.http.presenter import AnswerTo
from inflight.entrypoints.openai.chat_presenter import ChatPresenter
from inflight.outputs import CompletionOutput
from inflight.parsers.selector import create_output_parser
from tests.unit.entrypoints.outputs import completion, opened, output, request, row

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = partial(create_output_parser, "hermes", "qwen3", tools=[{"function": {"name": "f"}}])


def presenter(**more: Any) -> ChatPresenter:
    return ChatPresenter(AnswerTo("id", request(**more), "fp", None))


def parsed(pieces: list[str], reason: str | None, **more: Any) -> list[CompletionOutput]:
    """The outputs of the engine for a choice with a parser."""
    parser = TOOLS()
    found = [completion("", len(piece), events=parser.push(piece), **more) for piece in pieces]
    if reason is not None:
        found[-1].events = [*(found[-1].events or ()), *parser.finish(is_cut=reason != "stop")]
        found[-1].finish_reason = reason
    return found


def choice_of(text: str, reason: str) -> dict[str, Any]:
    body = json.loads(presenter().body([output(*parsed([text], reason))]))
    (choice,) = body["choices"]
    return dict(choice)


def streamed(pieces: list[str], reason: str) -> list[dict[str, Any]]:
    shown = presenter(stream=True)
    return [chunk["choices"][0] for each in parsed(pieces, reason) for chunk in opened(shown.chunks(0, output(each)))]


def test_an_answer() -> None:
    body = json.loads(presenter().body([output(completion("Hi", finish_reason="stop"))]))
    assert body["object"] == "chat.completion" and body["model"] == "m" and body["id"] == "id"
    message = {"role": "assistant", "content": "Hi", "refusal": None}
    assert body["choices"] == [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]


@pytest.mark.parametrize(("reason", "shown"), [("stop", "tool_calls"), ("length", "length"), ("abort", "abort")])
def test_calls_end_a_choice_only_if_it_ended_by_itself(reason: str, shown: str) -> None:
    choice = choice_of(CALL, reason)
    assert choice["finish_reason"] == shown
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert choice_of("text", reason)["finish_reason"] == reason
    for length in (20, CALL.index("1")):  # the last chunk has the whole call, or only the rest of its arguments
        assert streamed([CALL[:length], CALL[length:]], reason)[-1]["finish_reason"] == shown


def test_a_call_that_was_cut_shows_what_there_is_of_it() -> None:
    choice = choice_of(CALL[: CALL.index("</")], "length")
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_a_stream_brings_what_the_parser_held() -> None:
    """Text that could have become a call, at the end of the stream."""
    deltas = [choice["delta"] for choice in streamed(["x <tool", "_c", ""], "stop")]
    assert "".join(delta.get("content", "") for delta in deltas) == "x <tool_c"


def test_a_stream_says_role_deltas_and_end() -> None:
    role, *parts = streamed(["<think>a", "b</think>", "c", CALL, ""], "stop")
    assert role["delta"] == {"role": "assistant", "content": ""}
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["tool_calls"]
    deltas = [part["delta"] for part in parts]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "ab"
    assert "".join(delta.get("content", "") for delta in deltas) == "c"
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["function"]["name"] == "f" and calls[0]["id"]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'


@pytest.mark.parametrize("names", [("reasoning_content",), ("reasoning",), ("reasoning_content", "reasoning"), ()])
def test_the_reasoning_is_in_the_wanted_members(names: tuple[str, ...]) -> None:
    outputs = parsed(["<think>a", "b</think>", "c"], "stop")
    shown = presenter(stream=True, reasoning_fields=names)
    chunks = [chunk for each in outputs for chunk in opened(shown.chunks(0, output(each)))]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    found = {name: "".join(delta.get(name, "") for delta in deltas) for name in ("reasoning_content", "reasoning")}
    assert found == {name: "ab" if name in names else "" for name in found}
    assert "".join(delta.get("content", "") for delta in deltas) == "c"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    whole = presenter(reasoning_fields=names).body([output(*parsed(["<think>ab</think>c"], "stop"))])
    message = json.loads(whole)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "c", "refusal": None, **dict.fromkeys(names, "ab")}


def test_the_tokens_of_the_reasoning_are_counted() -> None:
    shown = presenter(stream=True, include_usage=True)
    for each in parsed(["<think>a", "b</think>", "c"], "stop", num_reasoning_tokens=2):
        shown.chunks(0, output(each))
    (usage,) = opened([shown.usage_chunk()])
    assert usage["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    body = json.loads(presenter().body([output(*parsed(["<think>a"], "stop", num_reasoning_tokens=1))]))
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}


def test_a_token_without_text_is_a_chunk() -> None:
    """A client measures its tokens' times by them. With a parser a chunk says what is certain."""
    shown = presenter(stream=True)
    shown.chunks(0, output(completion("a")))
    (chunk,) = opened(shown.chunks(0, output(completion("", 1))))
    assert chunk["choices"][0]["delta"] == {"content": ""}
    assert shown.chunks(0, output(completion("", 0))) == []
    (last,) = opened(shown.chunks(0, output(completion("", 1, finish_reason="stop"))))
    assert last["choices"][0] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None
    }  # fmt: skip


def test_choices_have_calls_of_their_own() -> None:
    shown = presenter(stream=True)
    steps = zip(parsed([CALL[:30], CALL[30:]], "stop", index=0), parsed(["text", "!"], "stop", index=1), strict=True)
    chunks = [chunk for both in steps for chunk in opened(shown.chunks(0, output(*both)))]
    found = [chunk["choices"][0] for chunk in chunks]
    assert [choice["index"] for choice in found if "role" in choice["delta"]] == [0, 1]
    assert "".join(choice["delta"].get("content", "") for choice in found if choice["index"] == 1) == "text!"
    assert {choice["finish_reason"] for choice in found if choice["index"] == 0} == {None, "tool_calls"}


def test_logprobs_and_ids_go_with_the_first_chunk_of_a_step() -> None:
    shown = presenter(stream=True, top_logprobs=1, return_token_ids=True)
    events = TOOLS().push(f"say {CALL}")
    chunks = opened(shown.chunks(0, output(completion("", 2, logprobs=[row("a"), row("b")], events=events))))
    _, first, *others = [chunk["choices"][0] for chunk in chunks]
    assert [entry["token"] for entry in first["logprobs"]["content"]] == ["a", "b"]
    assert first["token_ids"] == [7, 7]
    assert others and all(choice["logprobs"] is None and "token_ids" not in choice for choice in others)
    assert chunks[0]["prompt_token_ids"] == [0, 1, 2]
