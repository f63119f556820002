"""pydantic-ai with `OpenAIChatModel`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from conversations import (
    EXTRACT,
    MODEL,
    PERSON,
    STORY,
    SUM,
    SUM_ANSWER,
    TOO_LONG,
    WEATHER_ANSWER,
    WEATHER_QUESTION,
    Person,
)
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.usage import UsageLimits


def get_weather(city: str) -> dict[str, Any]:
    """Get the weather in a city"""
    return {"temperature": 21, "condition": "sunny"}


@pytest.fixture
def model(base_url: str, api_key: str) -> OpenAIChatModel:
    return OpenAIChatModel(
        MODEL, provider=OpenAIProvider(base_url=base_url, api_key=api_key), settings=ModelSettings(temperature=0)
    )


def test_chat_and_its_usage(model: OpenAIChatModel) -> None:
    result = Agent(model).run_sync(SUM)
    assert result.output == SUM_ANSWER
    assert result.usage.output_tokens > 5


def test_conversation(model: OpenAIChatModel) -> None:
    agent = Agent(model, instructions="Be concise.")
    first = agent.run_sync(SUM)
    assert agent.run_sync(SUM, message_history=first.all_messages()).output == SUM_ANSWER


def test_stream(model: OpenAIChatModel) -> None:
    async def texts() -> list[str]:
        async with Agent(model).run_stream(SUM) as result:
            return [text async for text in result.stream_text(debounce_by=None)]

    found = asyncio.run(texts())
    assert len(found) > 2
    assert found[-1] == SUM_ANSWER


def test_abort_in_mid_stream(model: OpenAIChatModel) -> None:
    async def first_then_ask() -> str:
        async with Agent(model).run_stream(STORY) as result:
            async for _ in result.stream_text(debounce_by=None):
                break
        return (await Agent(model).run(SUM)).output

    assert asyncio.run(first_then_ask()) == SUM_ANSWER


def test_tool_loop(model: OpenAIChatModel) -> None:
    assert Agent(model, tools=[get_weather]).run_sync(WEATHER_QUESTION).output == WEATHER_ANSWER


def test_streamed_tool_loop(model: OpenAIChatModel) -> None:
    async def answer() -> str:
        async with Agent(model, tools=[get_weather]).run_stream(WEATHER_QUESTION) as result:
            return await result.get_output()

    assert asyncio.run(answer()) == WEATHER_ANSWER


@pytest.mark.parametrize("form", [NativeOutput, PromptedOutput, ToolOutput])
def test_structured_output(model: OpenAIChatModel, form: Any) -> None:
    output = Agent(model, output_type=form(Person)).run_sync(EXTRACT).output
    assert isinstance(output, Person)
    if form is NativeOutput:
        assert output == Person(**PERSON)  # type: ignore[arg-type]


def test_structured_output_with_a_tool(model: OpenAIChatModel) -> None:
    agent = Agent(model, output_type=NativeOutput(Person), tools=[get_weather])
    assert isinstance(agent.run_sync(EXTRACT, usage_limits=UsageLimits(request_limit=6)).output, Person)


def test_fixed_max_tokens_while_the_conversation_grows(model: OpenAIChatModel) -> None:
    agent = Agent(model, model_settings=ModelSettings(max_tokens=2000))
    history: Any = None
    for _ in range(4):
        result = agent.run_sync(SUM, message_history=history)
        history = result.all_messages()
        assert result.output


def test_context_overflow(model: OpenAIChatModel) -> None:
    with pytest.raises(ModelHTTPError) as caught:
        Agent(model).run_sync(TOO_LONG)
    body: Any = caught.value.body
    assert caught.value.status_code == 400
    assert body["code"] == "context_length_exceeded"
    assert "maximum context length" in body["message"]


def test_wrong_key(base_url: str) -> None:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=base_url, api_key="wrong"))
    with pytest.raises(ModelHTTPError) as caught:
        Agent(model).run_sync(SUM)
    assert caught.value.status_code == 401
