"""Anthropic's own Python SDK."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from conversations import (
    EXTRACT,
    MAX_MODEL_LEN,
    MODEL,
    PERSON,
    STORY,
    SUM,
    SUM_ANSWER,
    TOO_LONG,
    WEATHER_ANSWER,
    WEATHER_CALL,
    WEATHER_QUESTION,
    WEATHER_RESULT,
    WEATHER_TOOL,
    Person,
    user,
)

# the client has no argument for the temperature, but the API has a field
GREEDY: dict[str, Any] = {"model": "claude-opus-5-5", "max_tokens": 60, "extra_body": {"temperature": 0}}
TOOL: dict[str, Any] = {
    "name": WEATHER_TOOL["function"]["name"],
    "description": WEATHER_TOOL["function"]["description"],
    "input_schema": WEATHER_TOOL["function"]["parameters"],
}


@pytest.fixture(scope="module")
def client(url: str, api_key: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=url, api_key=api_key, max_retries=0, timeout=60) as made:
        yield made


def ask(client: Anthropic, text: str = SUM, **more: Any) -> Any:
    return client.messages.create(messages=[user(text)], **{**GREEDY, **more})


def test_an_answer_and_its_usage(client: Anthropic) -> None:
    answer = ask(client, metadata={"user_id": "x"}, system="x-anthropic-billing-header: cc_version=1;")
    assert [block.text for block in answer.content] == [SUM_ANSWER]
    assert (answer.stop_reason, answer.role, answer.type, answer.model) == (
        "end_turn",
        "assistant",
        "message",
        GREEDY["model"],
    )
    counted = client.messages.count_tokens(model="any", messages=[{"role": "user", "content": SUM}])
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert client.beta.messages.create(messages=[{"role": "user", "content": SUM}], **GREEDY).content[0].type == "text"


def test_streams(client: Anthropic) -> None:
    whole = ask(client, STORY).content[0].text
    with client.messages.stream(messages=[{"role": "user", "content": STORY}], **GREEDY) as stream:
        assert "".join(stream.text_stream) == whole
    final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 60)
    kinds = [event.type for event in ask(client, STORY, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_several_at_once(url: str, api_key: str) -> None:
    async def answers() -> list[Any]:
        async with AsyncAnthropic(base_url=url, auth_token=api_key, api_key=None, max_retries=0) as client:
            return await asyncio.gather(*[client.messages.create(messages=[user(SUM)], **GREEDY) for _ in range(8)])  # type: ignore[call-overload]

    assert [answer.content[0].text for answer in asyncio.run(answers())] == [SUM_ANSWER] * 8


def test_a_loop_with_a_tool(client: Anthropic) -> None:
    messages: list[Any] = [user(WEATHER_QUESTION)]
    first = client.messages.create(messages=messages, tools=[TOOL], **GREEDY)
    (call,) = first.content
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", WEATHER_CALL)
    assert first.stop_reason == "tool_use"
    with client.messages.stream(messages=messages, tools=[TOOL], **GREEDY) as stream:
        assert [block.input for block in stream.get_final_message().content] == [WEATHER_CALL]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": WEATHER_RESULT}]}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(messages=messages, tools=[TOOL], **GREEDY)
    assert second.content[0].text == WEATHER_ANSWER
    forced = ask(client, tools=[TOOL], tool_choice={"type": "any"})
    assert forced.content[0].type == "tool_use"


def test_structured_output(client: Anthropic) -> None:
    parsed = client.messages.parse(messages=[{"role": "user", "content": EXTRACT}], output_format=Person, **GREEDY)
    assert parsed.parsed_output == Person(**PERSON)


def test_thinking_is_accepted(client: Anthropic) -> None:
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}, {"type": "disabled"}):
        assert ask(client, thinking=thinking, max_tokens=2048).content[0].text == SUM_ANSWER


def test_models(client: Anthropic) -> None:
    (model,) = list(client.models.list())
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
    assert client.models.retrieve(MODEL).created_at == model.created_at


def test_errors_have_their_classes(client: Anthropic, url: str) -> None:
    with pytest.raises(
        anthropic.BadRequestError, match=rf"prompt is too long: \d+ tokens > {MAX_MODEL_LEN - 1} maximum"
    ):
        ask(client, TOO_LONG)
    with pytest.raises(anthropic.BadRequestError, match="top_k"):
        ask(client, extra_body={"top_k": -5})
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("another")
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with (
        Anthropic(base_url=url, api_key="wrong-key", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        ask(stranger)
