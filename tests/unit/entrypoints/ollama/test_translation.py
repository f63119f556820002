"""Requests of Ollama's API as chats and completions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from inflight.entrypoints.fields.images import RequestImages
from inflight.entrypoints.http.chat_request import ChatRequest as Chat
from inflight.entrypoints.http.thinking import Thoughts
from inflight.entrypoints.ollama.protocol import ChatRequest, GenerateRequest
from inflight.entrypoints.ollama.translation import _conversation, read_chat, served_name
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.unit.entrypoints.openai.test_chat import server
from tests.unit.entrypoints.refusals import refused

USER = {"role": "user", "content": "Hi"}


def chat(**fields: Any) -> Chat:
    return read_chat(server(), ChatRequest.model_validate({"messages": [USER], **fields}))


def test_options_have_the_names_of_parameters() -> None:
    asked = chat(
        options={"repeat_penalty": 1.5, "num_predict": 7, "top_k": 3, "stop": ["x"], "seed": -1, "top_p": None}
    )
    params = asked.params
    assert (params.repetition_penalty, params.max_tokens, params.top_k, params.stop) == (1.5, 7, 3, ("x",))
    assert (params.seed, params.top_p, asked.presentation.stream) == (-1, 1.0, True)
    for unlimited in (0, -1, -2):
        assert chat(options={"num_predict": unlimited}).params.max_tokens == 100, "the whole context"
    assert chat().params.max_tokens is None
    assert chat(stream=False).presentation.stream is False


def test_format_and_thinking() -> None:
    assert chat(format="").params.structured_outputs is None
    assert chat(format="json").params.structured_outputs == StructuredOutputsParams(json_object=True)
    wanted = StructuredOutputsParams(json={"type": "object"}, lenient=True)
    assert chat(format={"type": "object"}).params.structured_outputs == wanted
    assert chat().thoughts == Thoughts()
    for think, on, effort in ((True, True, None), (False, False, None), ("low", True, "low")):
        found = chat(think=think).thoughts
        assert (found.effort, found.is_on, found.effort_field == "think") == (effort, on, effort is not None)


def test_results_belong_to_the_calls_in_their_order() -> None:
    calls = [{"function": {"name": "f", "arguments": {"a": 1}, "index": 0}}, {"id": "own", "function": {"name": "g"}}]
    results = [{"role": "tool", "tool_name": name, "content": name} for name in "fg"]
    history = [USER, {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls}, *results]
    _, made, first, second = chat(messages=history).prompt.messages
    assert made["reasoning_content"] == "Hm."
    ids = [call["id"] for call in made["tool_calls"]]
    assert ids == [first["tool_call_id"], second["tool_call_id"]] == ["call00000", "own"]
    assert made["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert (first["name"], second["name"]) == ("f", "g")
    assert chat(messages=[*history, *history]).prompt.messages[5]["tool_calls"][0]["id"] == "call00002"
    assert "tool_call_id" not in chat(messages=[USER, {"role": "tool", "content": "x"}]).prompt.messages[1]
    named = chat(messages=[*history[:2], {**results[0], "tool_call_id": "mine"}]).prompt.messages[2]
    assert named["tool_call_id"] == "mine"


@pytest.mark.parametrize(
    ("fields", "messages"),
    [({}, [("user", "Hi")]), ({"system": "S"}, [("system", "S"), ("user", "Hi")]), ({"system": ""}, [("user", "Hi")])],
)
def test_a_prompt_is_a_message(fields: dict[str, Any], messages: list[tuple[str, str]]) -> None:
    found = _conversation(GenerateRequest(prompt="Hi", **fields), [], RequestImages(are_read=False))
    assert [(message.role, message.content) for message in found.values()] == messages
    assert list(found) == ["system", "prompt"][-len(messages) :]


def test_latest_may_be_added_to_a_name_or_left_out() -> None:
    here = cast("Any", SimpleNamespace(model_names=("foo:latest", "bar"), check_model=lambda name: name))
    for asked, found in (("foo", "foo:latest"), ("foo:latest", "foo:latest"), ("bar:latest", "bar"), ("x", "x")):
        assert served_name(here, asked) == found
    assert served_name(here, None) is None, "check_model chooses"


def test_images_in_older_messages_and_in_results_are_texts() -> None:
    text = "[image: left out, because this model reads text only]"
    picture = {"role": "user", "content": "Look", "images": ["aGk="]}
    answer = {"role": "assistant", "content": "A cat.", "images": ["aGk="]}
    result = {"role": "tool", "images": ["aGk=", "aGk="]}
    left_out: list[str] = []
    body = ChatRequest.model_validate({"messages": [picture, answer, USER, {**USER, "images": []}, result]})
    found = _conversation(body, left_out, RequestImages(are_read=False))
    assert list(found) == [f"messages[{i}]" for i in range(5)]
    assert [message.content for message in found.values()] == [f"Look\n{text}", f"A cat.\n{text}", "Hi", "Hi", text]
    assert left_out == ["messages[].images"] * 3
    with refused("messages[2].images"):
        body = ChatRequest.model_validate({"messages": [picture, answer, picture]})
        _conversation(body, [], RequestImages(are_read=False))
