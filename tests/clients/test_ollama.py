"""Ollama's own Python package."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import ollama
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
    WEATHER_TOOL,
    Person,
    user,
)

GREEDY = {"temperature": 0, "num_predict": 60}


@pytest.fixture(scope="module")
def client(url: str, api_key: str) -> ollama.Client:
    return ollama.Client(host=url, headers={"Authorization": f"Bearer {api_key}"}, timeout=60)


def test_answers_and_streams(client: ollama.Client) -> None:
    answer = client.chat(f"{MODEL}:latest", messages=[user(SUM)], options=GREEDY, keep_alive="5m")
    assert (answer.message.content, answer.done_reason) == (SUM_ANSWER, "stop")
    assert min(answer.total_duration, answer.prompt_eval_count, answer.eval_count, answer.eval_duration) > 0  # type: ignore[type-var]
    whole = client.generate(MODEL, STORY, options=GREEDY)
    assert (whole.done_reason, whole.eval_count) == ("length", 60)
    pieces = list(client.generate(MODEL, STORY, options=GREEDY, stream=True))
    assert "".join(piece.response for piece in pieces) == whole.response and len(pieces) > 10
    assert client.generate(MODEL, "7 + 5 =", raw=True, options=GREEDY).response


def test_several_at_once(url: str, api_key: str) -> None:
    async def answers() -> list[Any]:
        client = ollama.AsyncClient(host=url, headers={"Authorization": f"Bearer {api_key}"})
        return await asyncio.gather(*[client.chat(MODEL, messages=[user(SUM)], options=GREEDY) for _ in range(8)])

    assert [answer.message.content for answer in asyncio.run(answers())] == [SUM_ANSWER] * 8


def test_a_loop_with_a_tool(client: ollama.Client) -> None:
    messages: list[Any] = [user(WEATHER_QUESTION)]
    message = client.chat(MODEL, messages=messages, tools=[WEATHER_TOOL], options=GREEDY).message
    (call,) = message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("get_weather", WEATHER_CALL)
    messages += [message, {"role": "tool", "tool_name": "get_weather", "content": WEATHER_RESULT}]
    for stream in (False, True):
        answer = client.chat(MODEL, messages=messages, tools=[WEATHER_TOOL], options=GREEDY, stream=stream)  # type: ignore[call-overload]
        pieces = answer if stream else [answer]
        assert "".join(piece.message.content or "" for piece in pieces) == WEATHER_ANSWER


def test_structured_output(client: ollama.Client) -> None:
    answer = client.chat(
        MODEL, messages=[user(EXTRACT)], format=Person.model_json_schema(), think=False, options=GREEDY
    )
    assert json.loads(answer.message.content or "") == PERSON


def test_the_model_and_its_pull(client: ollama.Client) -> None:
    (model,) = client.list().models
    assert (model.model, client.ps().models[0].context_length) == (MODEL, 2048)
    shown = client.show(MODEL)
    assert shown.capabilities == ["completion", "tools"] and shown.modelinfo is not None
    assert shown.modelinfo["qwen3.context_length"] == 2048
    assert client.pull(MODEL).status == "success"
    assert [state.status for state in client.pull(MODEL, stream=True)][-1] == "success"


def test_vectors_of_a_model_that_chats(client: ollama.Client) -> None:
    vectors = client.embed(MODEL, input=["a", "b", "a"]).embeddings
    assert vectors[0] == vectors[2] != vectors[1]
    assert sum(value * value for value in vectors[0]) == pytest.approx(1, abs=1e-5)


def test_errors_are_texts(client: ollama.Client, url: str) -> None:
    for call, status, words in (
        (lambda: client.chat("other", messages=[user(SUM)]), 404, "does not exist"),
        (lambda: list(client.chat(MODEL, messages=[user(TOO_LONG)], stream=True)), 400, "maximum context length"),
        (lambda: client.embed(MODEL, input="a", dimensions=7), 400, "dimensions=7"),
        (lambda: client.chat(MODEL, messages=[user(SUM)], options={"top_p": 5}), 400, "options.top_p"),
        (lambda: ollama.Client(host=url).list(), 401, "No API key"),
    ):
        with pytest.raises(ollama.ResponseError, match=words) as caught:
            call()
        assert caught.value.status_code == status
