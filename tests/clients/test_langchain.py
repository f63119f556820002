"""LangChain (`langchain-openai`), its agents, and LangGraph."""

from __future__ import annotations

from typing import Any, Literal

import openai
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
    WEATHER_CALL,
    WEATHER_QUESTION,
    WEATHER_RESULT,
    long_history,
)
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel


class Person(BaseModel):
    """A person"""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city"""
    return WEATHER_RESULT


@pytest.fixture(scope="module")
def model(base_url: str, api_key: str) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=base_url, api_key=api_key, temperature=0, max_retries=0, timeout=60)  # type: ignore[arg-type]


def test_chat_stream_and_batch(model: ChatOpenAI) -> None:
    answer = model.invoke(SUM)
    assert answer.content == SUM_ANSWER
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 5
    assert "".join(str(chunk.content) for chunk in model.stream(SUM)) == SUM_ANSWER
    assert [one.content for one in model.batch([SUM] * 4)] == [SUM_ANSWER] * 4


def test_the_responses_api(base_url: str, api_key: str) -> None:
    model = ChatOpenAI(model=MODEL, base_url=base_url, api_key=api_key, temperature=0, use_responses_api=True)  # type: ignore[arg-type]
    assert model.invoke(SUM).text == SUM_ANSWER
    assert "".join(chunk.text for chunk in model.stream(SUM)) == SUM_ANSWER
    assert model.bind_tools([get_weather]).invoke(WEATHER_QUESTION).tool_calls[0]["args"] == WEATHER_CALL


def test_usage_of_a_stream(base_url: str, api_key: str) -> None:
    model = ChatOpenAI(model=MODEL, base_url=base_url, api_key=api_key, temperature=0, stream_usage=True)  # type: ignore[arg-type]
    whole: Any = None
    for chunk in model.stream(SUM):
        whole = chunk if whole is None else whole + chunk
    assert whole.content == SUM_ANSWER
    assert whole.usage_metadata["output_tokens"] > 5


def test_completion(base_url: str, api_key: str) -> None:
    model = OpenAI(model=MODEL, base_url=base_url, api_key=api_key, temperature=0, max_tokens=8)  # type: ignore[arg-type]
    assert model.invoke("Once upon a time")


@pytest.mark.parametrize("choice", ["auto", "required", "get_weather"])
@pytest.mark.parametrize("strict", [None, True])
def test_tool_loop(model: ChatOpenAI, choice: str, strict: bool | None) -> None:
    bound = model.bind_tools([get_weather], tool_choice=choice, strict=strict)
    first = bound.invoke(WEATHER_QUESTION)
    (call,) = first.tool_calls
    assert call["args"] == WEATHER_CALL
    result = ToolMessage(WEATHER_RESULT, tool_call_id=call["id"])
    answer = model.bind_tools([get_weather]).invoke([HumanMessage(WEATHER_QUESTION), first, result])
    assert answer.content == WEATHER_ANSWER


def test_streamed_call(model: ChatOpenAI) -> None:
    whole: Any = None
    for chunk in model.bind_tools([get_weather]).stream(WEATHER_QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"] == WEATHER_CALL


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(model: ChatOpenAI, method: Literal["json_schema", "function_calling", "json_mode"]) -> None:
    person = model.with_structured_output(Person, method=method).invoke(EXTRACT)
    assert isinstance(person, Person)
    if method != "function_calling":  # the small model is not reliable when it extracts by a call
        assert person == Person(**PERSON)  # type: ignore[arg-type]


def test_structured_output_goes_back_into_the_history(model: ChatOpenAI) -> None:
    found: Any = model.with_structured_output(Person, method="json_schema", include_raw=True).invoke(EXTRACT)
    assert found["parsed"] == Person(**PERSON)  # type: ignore[arg-type]
    answer = model.invoke([HumanMessage(EXTRACT), found["raw"], HumanMessage(SUM)])
    assert answer.content == SUM_ANSWER


def test_agent(model: ChatOpenAI) -> None:
    agent = create_agent(model, [get_weather])
    answer = agent.invoke({"messages": [HumanMessage(WEATHER_QUESTION)]})
    assert answer["messages"][-1].content == WEATHER_ANSWER


def test_agent_of_langgraph_with_a_memory(model: ChatOpenAI) -> None:
    agent = create_agent(model, [get_weather], checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    answer = agent.invoke({"messages": [HumanMessage(WEATHER_QUESTION)]}, config)
    assert answer["messages"][-1].content == WEATHER_ANSWER
    answer = agent.invoke({"messages": [HumanMessage(WEATHER_QUESTION)]}, config)
    assert len(answer["messages"]) > 5
    assert answer["messages"][-1].content
    kinds = [
        kind for kind, _ in agent.stream({"messages": [HumanMessage(SUM)]}, config, stream_mode=["messages", "values"])
    ]
    assert "messages" in kinds


def test_agent_with_an_output_format_as_a_tool(model: ChatOpenAI) -> None:
    agent = create_agent(model, response_format=ToolStrategy(Person))
    assert isinstance(agent.invoke({"messages": [HumanMessage(EXTRACT)]})["structured_response"], Person)


def test_agent_with_a_tool_and_an_output_format(model: ChatOpenAI) -> None:
    agent = create_agent(model, [get_weather], response_format=ProviderStrategy(Person))
    answer = agent.invoke({"messages": [HumanMessage(EXTRACT)]}, {"recursion_limit": 6})
    assert isinstance(answer["structured_response"], Person)


def test_invalid_call_goes_back_into_the_history(model: ChatOpenAI) -> None:
    bad = {"name": "get_weather", "args": '{"city": ', "id": "call_1", "error": "no JSON", "type": "invalid_tool_call"}
    messages = [
        HumanMessage(WEATHER_QUESTION),
        AIMessage("", invalid_tool_calls=[bad]),
        ToolMessage("error: the arguments are not JSON", tool_call_id="call_1"),
        HumanMessage(WEATHER_QUESTION),
    ]
    answer = model.bind_tools([get_weather]).invoke(messages)
    assert answer.tool_calls or answer.content


def test_fixed_max_tokens_while_the_conversation_grows(base_url: str, api_key: str) -> None:
    model = ChatOpenAI(model=MODEL, base_url=base_url, api_key=api_key, temperature=0, max_tokens=2000)  # type: ignore[arg-type, call-arg]
    assert model.invoke(long_history()).response_metadata["finish_reason"] == "stop"


def test_abort_in_mid_stream(model: ChatOpenAI) -> None:
    stream = model.stream(STORY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert model.invoke(SUM).content == SUM_ANSWER


def test_context_overflow_has_its_own_class(model: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        model.invoke(TOO_LONG)
    assert type(caught.value).__name__ == "OpenAIContextOverflowError"


def test_wrong_key(base_url: str) -> None:
    model = ChatOpenAI(model=MODEL, base_url=base_url, api_key="wrong", max_retries=0)  # type: ignore[arg-type]
    with pytest.raises(openai.AuthenticationError):
        model.invoke(SUM)


def test_embeddings(base_url: str, api_key: str) -> None:
    """`check_embedding_ctx_length=False`: the texts are sent, and not the token ids of an OpenAI model."""
    made = OpenAIEmbeddings(model=MODEL, base_url=base_url, api_key=api_key, check_embedding_ctx_length=False)
    texts = ["Anna has a dog.", "What is 2 + 3?"]
    documents, query = made.embed_documents(texts), made.embed_query(texts[1])
    assert len(documents) == 2 and query == pytest.approx(documents[1], abs=1e-6)
    assert sum(number * number for number in query) == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(openai.NotFoundError):
        OpenAIEmbeddings(
            model="other", base_url=base_url, api_key=api_key, check_embedding_ctx_length=False
        ).embed_query("a")
