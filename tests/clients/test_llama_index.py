"""LlamaIndex with `OpenAILike`."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
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
)
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Person(BaseModel):
    """A person"""

    name: str
    age: int


def get_weather(city: str) -> dict[str, Any]:
    """Get the weather in a city"""
    return {"temperature": 21, "condition": "sunny"}


def made(base_url: str, api_key: str, **more: Any) -> OpenAILike:
    fixed: dict[str, Any] = {"is_chat_model": True, "is_function_calling_model": True, "context_window": MAX_MODEL_LEN}
    return OpenAILike(
        model=MODEL, api_base=base_url, api_key=api_key, temperature=0, max_retries=0, timeout=60, **{**fixed, **more}
    )


@pytest.fixture
def llm(base_url: str, api_key: str) -> OpenAILike:
    return made(base_url, api_key)


def test_complete_chat_and_stream(llm: OpenAILike) -> None:
    assert llm.complete(SUM).text == SUM_ANSWER
    answer: Any = llm.chat([ChatMessage(role="user", content=SUM)])
    assert answer.message.content == SUM_ANSWER
    assert answer.raw.usage.completion_tokens > 5
    pieces = list(llm.stream_chat([ChatMessage(role="user", content=SUM)]))
    assert pieces[-1].message.content == SUM_ANSWER
    assert len(pieces) > 2


def test_completion_model(base_url: str, api_key: str) -> None:
    llm = made(base_url, api_key, is_chat_model=False, is_function_calling_model=False, max_tokens=8)
    assert llm.complete("Once upon a time").text


def test_tool_loop(llm: OpenAILike) -> None:
    tool = FunctionTool.from_defaults(get_weather)
    first = llm.chat_with_tools([tool], user_msg=WEATHER_QUESTION)
    (call,) = llm.get_tool_calls_from_response(first)
    assert call.tool_kwargs == WEATHER_CALL
    assert str(llm.predict_and_call([tool], user_msg=WEATHER_QUESTION)) == str(get_weather("Oslo"))


def test_agent(llm: OpenAILike) -> None:
    async def answer() -> str:
        plain_text = FunctionTool.from_defaults(
            lambda city: '{"temperature": 21, "condition": "sunny"}', name="get_weather"
        )
        plain_text.metadata.description = "Get the weather in a city"
        agent = FunctionAgent(tools=[plain_text], llm=llm, streaming=True)
        return str(await agent.run(WEATHER_QUESTION, max_iterations=4))

    assert asyncio.run(answer()) == WEATHER_ANSWER


@pytest.mark.parametrize("how", ["a call", "a schema"])
def test_structured_output(base_url: str, api_key: str, how: str) -> None:
    llm = made(base_url, api_key, should_use_structured_outputs=how == "a schema")
    answer = llm.as_structured_llm(Person).complete(EXTRACT)
    assert isinstance(answer.raw, Person)
    if how == "a schema":
        assert answer.raw == Person(**PERSON)  # type: ignore[arg-type]


def test_fixed_max_tokens_while_the_conversation_grows(base_url: str, api_key: str) -> None:
    llm = made(base_url, api_key, max_tokens=2030)
    turns = [ChatMessage(role="user", content=SUM), ChatMessage(role="assistant", content=SUM_ANSWER)] * 4
    assert llm.chat([*turns, ChatMessage(role="user", content=SUM)]).message.content


def test_abort_in_mid_stream(llm: OpenAILike) -> None:
    stream = llm.stream_complete(STORY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert llm.complete(SUM).text == SUM_ANSWER


def test_context_overflow(llm: OpenAILike) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        llm.complete(TOO_LONG)
    assert caught.value.code == "context_length_exceeded"


def test_wrong_key(base_url: str) -> None:
    with pytest.raises(openai.AuthenticationError, match="Incorrect API key provided"):
        made(base_url, "wrong").complete(SUM)


def test_embeddings(base_url: str, api_key: str) -> None:
    made = OpenAILikeEmbedding(model_name=MODEL, api_base=base_url, api_key=api_key, embed_batch_size=2)
    texts = ["Anna has a dog.", "What is 2 + 3?", "A story about a fox."]
    documents, query = made.get_text_embedding_batch(texts), made.get_query_embedding(texts[1])
    assert len(documents) == 3 and query == pytest.approx(documents[1], abs=1e-6)
    assert sum(number * number for number in query) == pytest.approx(1.0, abs=1e-5)
    assert asyncio.run(made.aget_text_embedding(texts[0])) == pytest.approx(documents[0], abs=1e-6)
