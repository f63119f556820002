"""Requests of Ollama's API as chats and completions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from inflight.entrypoints.ollama.protocol import ChatRequest, GenerateRequest
from inflight.entrypoints.ollama.translation import _common, _conversation, served_name
from inflight.entrypoints.openai.errors import FieldError
from inflight.entrypoints.openai.protocol import ChatCompletionRequest
from inflight.entrypoints.openai.thinking import Thoughts, thoughts_of

USER = {"role": "user", "content": "Hi"}


def chat(**fields: Any) -> ChatCompletionRequest:
    body = ChatRequest.model_validate({"messages": [USER], **fields})
    return ChatCompletionRequest(**_common(body, 512), **_conversation(body, []))


def test_options_have_the_names_of_a_chat() -> None:
    asked = chat(
        options={"repeat_penalty": 1.5, "num_predict": 7, "top_k": 3, "stop": ["x"], "seed": -1, "top_p": None}
    )
    assert (asked.repetition_penalty, asked.max_tokens, asked.top_k, asked.given_constraints()["stop"]) == (
        1.5,
        7,
        3,
        ["x"],
    )
    assert (asked.seed, asked.top_p, asked.stream) == (-1, None, True)
    for unlimited in (0, -1, -2):
        assert chat(options={"num_predict": unlimited}).max_tokens == 512
    assert chat(stream=False).stream is False


def test_format_and_thinking() -> None:
    assert (chat(format="").constraint(), chat(format="json").format) == (None, "json")
    assert chat(format={"type": "object"}).format == {"type": "object"}
    assert thoughts_of(chat()) == Thoughts()
    for think, on, effort in ((True, True, None), (False, False, None), ("low", True, "low")):
        found = thoughts_of(chat(think=think))
        assert (found.effort, found.is_on, found.effort_field == "think") == (effort, on, effort is not None)


def test_results_belong_to_the_calls_in_their_order() -> None:
    calls = [{"function": {"name": "f", "arguments": {"a": 1}, "index": 0}}, {"id": "own", "function": {"name": "g"}}]
    results = [{"role": "tool", "tool_name": name, "content": name} for name in "fg"]
    history = [USER, {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls}, *results]
    _, made, first, second = chat(messages=history).messages
    assert made.reasoning_content == "Hm." and made.tool_calls is not None
    assert [call.id for call in made.tool_calls] == [first.tool_call_id, second.tool_call_id] == ["call00000", "own"]
    assert made.tool_calls[0].function.arguments == {"a": 1}
    assert (first.name, second.name) == ("f", "g")
    again = chat(messages=[*history, *history]).messages[5].tool_calls
    assert again is not None and again[0].id == "call00002"
    lone = chat(messages=[USER, {"role": "tool", "content": "x"}]).messages[1]
    assert lone.tool_call_id is None
    named = chat(messages=[*history[:2], {**results[0], "tool_call_id": "mine"}]).messages[2]
    assert named.tool_call_id == "mine"


@pytest.mark.parametrize(
    ("fields", "messages"),
    [({}, [("user", "Hi")]), ({"system": "S"}, [("system", "S"), ("user", "Hi")]), ({"system": ""}, [("user", "Hi")])],
)
def test_a_prompt_is_a_message(fields: dict[str, Any], messages: list[tuple[str, str]]) -> None:
    found = _conversation(GenerateRequest(prompt="Hi", **fields), [])["messages"]
    assert [(message["role"], message["content"]) for message in found] == messages


def test_latest_may_be_added_to_a_name_or_left_out() -> None:
    server = cast("Any", SimpleNamespace(model_names=("foo:latest", "bar"), check_model=lambda name: name))
    for asked, found in (("foo", "foo:latest"), ("foo:latest", "foo:latest"), ("bar:latest", "bar"), ("x", "x")):
        assert served_name(server, asked) == found
    assert served_name(server, None) is None, "check_model chooses"


def test_images_in_older_messages_and_in_results_are_texts() -> None:
    text = "[image: left out, because this model reads text only]"
    picture = {"role": "user", "content": "Look", "images": ["aGk="]}
    answer = {"role": "assistant", "content": "A cat.", "images": ["aGk="]}
    result = {"role": "tool", "images": ["aGk=", "aGk="]}
    left_out: list[str] = []
    body = ChatRequest.model_validate({"messages": [picture, answer, USER, {**USER, "images": []}, result]})
    found = _conversation(body, left_out)["messages"]
    assert [message["content"] for message in found] == [f"Look\n{text}", f"A cat.\n{text}", "Hi", "Hi", text]
    assert left_out == ["messages[].images"] * 3
    with pytest.raises(FieldError) as raised:
        _conversation(ChatRequest.model_validate({"messages": [picture, answer, picture]}), [])
    assert raised.value.param == "messages[2].images"
