"""openai-agents, with its default model, which uses the Responses API, and with its model for chats."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from conversations import (
    EXTRACT,
    MODEL,
    PERSON,
    SUM,
    SUM_ANSWER,
    TOO_LONG,
    WEATHER_ANSWER,
    WEATHER_QUESTION,
    WEATHER_RESULT,
    Person,
)
from openai import AsyncOpenAI


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city"""
    return WEATHER_RESULT


set_tracing_disabled(True)  # it would send traces to OpenAI


KINDS: tuple[type[Any], ...] = (OpenAIChatCompletionsModel, OpenAIResponsesModel)


def model_of(base_url: str, api_key: str, kind: type[Any] = OpenAIResponsesModel) -> Model:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60)
    made: Model = kind(model=MODEL, openai_client=client)
    return made


@pytest.fixture(params=KINDS, ids=["chat", "responses"])
def model(base_url: str, api_key: str, request: pytest.FixtureRequest) -> Model:
    return model_of(base_url, api_key, request.param)


def agent(model: Model, *, max_tokens: int | None = None, **more: Any) -> Agent[None]:
    settings = ModelSettings(temperature=0, include_usage=True, max_tokens=max_tokens)
    return Agent(name="tested", model=model, model_settings=settings, **more)


def run(agent: Agent[None], what: Any) -> Any:
    return asyncio.run(Runner.run(agent, what, max_turns=6))


def test_chat_and_its_usage(model: Model) -> None:
    result = run(agent(model), SUM)
    assert result.final_output == SUM_ANSWER
    assert result.context_wrapper.usage.output_tokens > 5


def test_conversation(model: Model) -> None:
    async def answers() -> list[Any]:
        first = await Runner.run(agent(model), SUM)
        second = await Runner.run(agent(model), [*first.to_input_list(), {"role": "user", "content": SUM}])
        return [first.final_output, second.final_output]

    assert asyncio.run(answers()) == [SUM_ANSWER, SUM_ANSWER]


def test_tool_loop(model: Model) -> None:
    assert run(agent(model, tools=[get_weather]), WEATHER_QUESTION).final_output == WEATHER_ANSWER


def test_streamed_tool_loop(model: Model) -> None:
    async def answer() -> tuple[set[str], Any]:
        result = Runner.run_streamed(agent(model, tools=[get_weather]), WEATHER_QUESTION, max_turns=6)
        kinds = {event.type async for event in result.stream_events()}
        return kinds, result.final_output

    kinds, output = asyncio.run(answer())
    assert output == WEATHER_ANSWER
    assert {"raw_response_event", "run_item_stream_event"} <= kinds


def test_structured_output(model: Model) -> None:
    assert run(agent(model, output_type=Person), EXTRACT).final_output == Person(**PERSON)  # type: ignore[arg-type]


def test_structured_output_with_a_strict_tool(model: Model) -> None:
    result = run(agent(model, output_type=Person, tools=[get_weather]), EXTRACT)
    assert isinstance(result.final_output, Person)


def test_fixed_max_tokens(model: Model) -> None:
    assert run(agent(model, max_tokens=2040, instructions="Be concise."), SUM).final_output


def test_context_overflow(model: Model) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        run(agent(model), TOO_LONG)
    assert caught.value.code == "context_length_exceeded"


def test_wrong_key(base_url: str) -> None:
    with pytest.raises(openai.AuthenticationError, match="Incorrect API key provided"):
        run(agent(model_of(base_url, "wrong")), SUM)
