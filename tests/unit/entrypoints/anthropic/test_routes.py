"""/v1/messages and /v1/messages/count_tokens over a played engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from inflight.entrypoints.fields.messages import MAX_MESSAGES
from tests.unit.entrypoints.api_client import MAX_MODEL_LEN, MODEL, SETTINGS, Answer, Api, serving

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
BOTH = pytest.mark.parametrize("path", [PATH, COUNT])
PROMPT = b"<user>x<assistant>"


def body_of(text: Any = "x", **more: Any) -> dict[str, Any]:
    return {"model": "claude", "messages": [{"role": "user", "content": text}], **more}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}, **more}


def refusal(answer: Answer, status: int = 400, kind: str = "invalid_request_error") -> str:
    """Checks the form of an error. Returns its message."""
    assert (answer.status, list(answer.json), answer.json["type"]) == (status, ["type", "error"], "error")
    assert (list(answer.error), answer.error["type"]) == (["type", "message"], kind)
    return str(answer.error["message"])


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with serving(replace(SETTINGS, served_model_names=("first", "second"))) as made:
        yield made


def test_an_answer(api: Api) -> None:
    answer = api.post(
        PATH, body_of(system="s", max_tokens=9, temperature=0.5, stop_sequences=["!"]), {"x-request-id": "mine"}
    )
    assert answer.headers["content-type"] == "application/json"
    assert answer.json == {
        "id": "msg-mine",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [{"type": "text", "text": "Hi"}],
        "stop_reason": "stop_sequence",
        "stop_sequence": "!",
        "usage": {
            "input_tokens": len(b"<system>s") + len(PROMPT),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 3,
        },
    }
    sampling = api.core.sequences[-1].sampling
    assert (sampling.max_tokens, sampling.params.temperature) == (9, 0.5)
    assert api.core.prompts[-1] == [*b"<system>s", *PROMPT]


def test_a_stream(api: Api) -> None:
    answer = api.post(PATH, body_of(stream=True))
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    kinds = [event["type"] for event in answer.events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    texts = [event["delta"]["text"] for event in answer.events if event["type"] == "content_block_delta"]
    assert "".join(texts) == "Hi!"
    assert "[DONE]" not in answer.text


def test_a_stream_that_waits_has_pings() -> None:
    with serving(replace(SETTINGS, stream_keep_alive_interval=0.02)) as api:
        api.core.held = True
        exchange = api.open(PATH, body_of(stream=True))
        exchange.until(lambda: "event: ping" in exchange.answer.text)
        exchange.leave()


@BOTH
def test_any_name_means_the_served_model_unless_names_are_strict(api: Api, path: str) -> None:
    for name in ("claude", "second"):
        answer = api.post(path, body_of(model=name))
        assert (answer.status, answer.json.get("model", name)) == (200, name)
    unnamed = api.post(path, body_of(model=None))
    assert (unnamed.status, unnamed.json.get("model", "first")) == (200, "first")
    with serving(replace(SETTINGS, strict_model_names=True)) as strict:
        assert "claude" in refusal(strict.post(path, body_of()), 404, "not_found_error")
        assert strict.post(path, body_of(model=MODEL)).status == 200


def test_the_tokens_of_a_prompt_are_counted_and_nothing_is_generated(api: Api) -> None:
    before = len(api.core.sequences)
    answer = api.post(COUNT, body_of("xyz"))
    assert (answer.json, answer.headers["content-type"]) == ({"input_tokens": len(PROMPT) + 2}, "application/json")
    assert api.post(COUNT, body_of(tools=[tool("f")])).json == {"input_tokens": len(b"[f]") + len(PROMPT)}
    assert len(api.core.sequences) == before


@BOTH
def test_a_tool_that_anthropic_runs_is_named_and_left_out(api: Api, path: str) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}, tool("f")]
    answer = api.post(path, body_of(tools=tools, of_another=1))
    assert (answer.status, answer.headers["x-ignored-fields"]) == (
        200,
        "of_another, tools[] (web_search_20250305), tools",
    )


def test_a_deferred_tool_is_not_listed(api: Api) -> None:
    tools = [tool("f"), tool("later", defer_loading=True)]
    assert api.post(COUNT, body_of(tools=tools)).json == {"input_tokens": len(b"[f]") + len(PROMPT)}


def test_the_servers_variables_of_the_template_are_read() -> None:
    with serving(replace(SETTINGS, default_chat_template_kwargs={"more": "!"})) as api:
        assert api.post(COUNT, body_of()).json == {"input_tokens": len(PROMPT) + 1}


@pytest.mark.parametrize(("length", "is_too_long"), [(MAX_MODEL_LEN - 1, False), (MAX_MODEL_LEN, True)])
def test_a_prompt_that_is_too_long_is_told_in_anthropics_words(api: Api, length: int, is_too_long: bool) -> None:
    """One token is for the answer. Clients ask for the count of a longer one, too."""
    text = "x" * (length - len(PROMPT) + 1)
    answer = api.post(PATH, body_of(text))
    if is_too_long:
        assert refusal(answer) == f"prompt is too long: {length} tokens > {MAX_MODEL_LEN - 1} maximum"
    else:
        assert (answer.status, answer.json["stop_reason"]) == (200, "model_context_window_exceeded")
    assert api.post(COUNT, body_of(text)).json == {"input_tokens": length}


@BOTH
def test_a_text_that_is_far_too_long_is_told_in_the_same_words(api: Api, path: str) -> None:
    message = refusal(api.post(path, body_of("x" * 10_000)))
    assert message.startswith("prompt is too long: ") and message.endswith(f" tokens > {MAX_MODEL_LEN - 1} maximum")


@BOTH
def test_more_messages_than_a_chat_may_have(api: Api, path: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
    message = refusal(api.post(path, body_of([result] * (MAX_MESSAGES + 1))))
    assert message.startswith("messages: too many messages: ") and str(MAX_MESSAGES) in message


@BOTH
def test_what_is_refused(api: Api, path: str) -> None:
    assert "messages" in refusal(api.post(path, body_of(messages=[])))
    assert "temperature" in refusal(api.post(PATH, body_of(temperature="1")))
    assert "max_tokens" in refusal(api.post(PATH, body_of(max_tokens=0)))
    assert "tool_choice" in refusal(api.post(path, body_of(tool_choice={"type": "tool"}, tools=[tool("f")])))


def test_a_schema_is_named_by_its_own_field(api: Api) -> None:
    wanted = {"format": {"type": "json_schema", "schema": {"type": "no such type"}}}
    message = refusal(api.post(PATH, body_of(output_config=wanted)))
    assert message.startswith("output_config.format")


@BOTH
def test_blocks_that_are_left_out_are_told(api: Api, path: str) -> None:
    answer = api.post(path, body_of([{"type": "text", "text": "x"}, {"type": "unheard_of", "text": "y"}], odd=1))
    assert answer.status == 200
    assert answer.headers["x-ignored-fields"] == "odd, messages[].content[] (unheard_of)"
