"""LiteLLM: `litellm.completion` as in its documentation, its router, and its adapter of Anthropic's API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pytest
from conversations import (
    EXTRACT,
    MODEL,
    PERSON,
    PERSON_SCHEMA,
    STORY,
    STRICT_WEATHER_TOOL,
    SUM,
    SUM_ANSWER,
    TOO_LONG,
    WEATHER_ANSWER,
    WEATHER_CALL,
    WEATHER_QUESTION,
    WEATHER_RESULT,
    WEATHER_TOOL,
    long_history,
    user,
)

# "openai/..." is for any server with OpenAI's API, "hosted_vllm/..." for servers with vLLM's extra fields
PROVIDERS = ["openai", "hosted_vllm"]


@pytest.fixture
def common(base_url: str, api_key: str) -> dict[str, Any]:
    return {"api_base": base_url, "api_key": api_key, "temperature": 0, "max_retries": 0, "timeout": 60}


@pytest.fixture(params=PROVIDERS)
def server(request: pytest.FixtureRequest, common: dict[str, Any]) -> dict[str, Any]:
    return {**common, "model": f"{request.param}/{MODEL}"}


def test_chat_and_its_usage(server: dict[str, Any]) -> None:
    answer: Any = litellm.completion(messages=[user(SUM)], **server)
    assert answer.choices[0].message.content == SUM_ANSWER
    assert answer.usage.completion_tokens > 5


def test_stream(server: dict[str, Any]) -> None:
    stream: Any = litellm.completion(
        messages=[user(SUM)], stream=True, stream_options={"include_usage": True}, **server
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SUM_ANSWER
    assert chunks[-1].usage.completion_tokens > 5


def test_many_at_once(server: dict[str, Any]) -> None:
    async def answers() -> list[Any]:
        return await asyncio.gather(*[litellm.acompletion(messages=[user(SUM)], **server) for _ in range(8)])

    assert [answer.choices[0].message.content for answer in asyncio.run(answers())] == [SUM_ANSWER] * 8


def test_text_completion(common: dict[str, Any]) -> None:
    model = f"text-completion-openai/{MODEL}"
    answer: Any = litellm.text_completion(model=model, prompt="Once upon a time", max_tokens=8, **common)
    assert answer.usage.completion_tokens == 8


def test_documented_tool_loop(server: dict[str, Any]) -> None:
    """The answer's message is sent back unchanged, with the fields that LiteLLM adds to it."""
    messages: list[Any] = [user(WEATHER_QUESTION)]
    first: Any = litellm.completion(messages=messages, tools=[WEATHER_TOOL], tool_choice="auto", **server)
    message = first.choices[0].message
    messages.append(message)
    for call in message.tool_calls:
        assert json.loads(call.function.arguments) == WEATHER_CALL
        messages.append(
            {"tool_call_id": call.id, "role": "tool", "name": call.function.name, "content": WEATHER_RESULT}
        )
    second: Any = litellm.completion(messages=messages, tools=[WEATHER_TOOL], **server)
    assert second.choices[0].message.content == WEATHER_ANSWER


def test_rebuilt_stream_goes_back_into_the_history(server: dict[str, Any]) -> None:
    messages: list[Any] = [user(WEATHER_QUESTION)]
    stream: Any = litellm.completion(messages=messages, tools=[WEATHER_TOOL], stream=True, **server)
    rebuilt: Any = litellm.stream_chunk_builder(list(stream), messages=messages)
    message = rebuilt.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": WEATHER_RESULT}
    answer: Any = litellm.completion(messages=[*messages, message, result], tools=[WEATHER_TOOL], **server)
    assert answer.choices[0].message.content == WEATHER_ANSWER


def test_structured_output(server: dict[str, Any]) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON_SCHEMA, "strict": True}}
    answer: Any = litellm.completion(messages=[user(EXTRACT)], response_format=schema, **server)
    assert json.loads(answer.choices[0].message.content) == PERSON


def test_structured_output_with_a_strict_tool(server: dict[str, Any]) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON_SCHEMA, "strict": True}}
    answer: Any = litellm.completion(
        messages=[user(WEATHER_QUESTION)], response_format=schema, tools=[STRICT_WEATHER_TOOL], **server
    )
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == WEATHER_CALL


def test_marks_for_anthropics_cache_are_no_error(server: dict[str, Any]) -> None:
    text = {"type": "text", "text": SUM, "cache_control": {"type": "ephemeral"}}
    answer: Any = litellm.completion(messages=[{"role": "user", "content": [text]}], **server)
    assert answer.choices[0].message.content == SUM_ANSWER


def test_fixed_max_tokens_while_the_conversation_grows(server: dict[str, Any]) -> None:
    answer: Any = litellm.completion(messages=long_history(), max_tokens=2000, **server)
    assert answer.choices[0].finish_reason == "stop"


def test_abort_in_mid_stream(server: dict[str, Any]) -> None:
    async def first_then_ask() -> Any:
        stream: Any = await litellm.acompletion(messages=[user(STORY)], stream=True, **server)
        await anext(stream)
        await stream.aclose()
        return await litellm.acompletion(messages=[user(SUM)], **server)

    assert asyncio.run(first_then_ask()).choices[0].message.content == SUM_ANSWER


def test_anthropic_adapter(common: dict[str, Any]) -> None:
    """With "openai/..." LiteLLM would use the Responses API, which Inflight does not serve."""
    server = {**common, "model": f"hosted_vllm/{MODEL}"}

    async def ask() -> Any:
        return await litellm.anthropic.messages.acreate(messages=[user(SUM)], max_tokens=50, **server)

    answer = asyncio.run(ask())
    assert answer["content"][0]["text"] == SUM_ANSWER
    assert answer["stop_reason"] == "end_turn"


def test_context_overflow_has_its_own_class(server: dict[str, Any]) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[user(TOO_LONG)], **server)


def test_router_falls_back_on_context_overflow(server: dict[str, Any]) -> None:
    """The fallback is a mocked short answer: the test checks only that the router uses it."""
    other = {**server, "mock_response": "from the larger model"}
    router = litellm.Router(
        model_list=[
            {"model_name": "small", "litellm_params": server},
            {"model_name": "large", "litellm_params": other},
        ],
        context_window_fallbacks=[{"small": ["large"]}],
        num_retries=0,
    )
    answer: Any = router.completion(model="small", messages=[user(TOO_LONG)])  # type: ignore[list-item]
    assert answer.choices[0].message.content == "from the larger model"


def test_wrong_key(server: dict[str, Any]) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=[user(SUM)], **{**server, "api_key": "wrong"})
