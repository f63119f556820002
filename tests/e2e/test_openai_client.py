"""The official `openai` client against the server with the embedded model: what users' programs do must work unchanged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai import AsyncOpenAI, OpenAI

from inflight.entrypoints.serve.settings import ServerSettings
from tests.e2e.openai_server import MODEL, RunningServer, running_server, wait_until_idle

SUM: list[Any] = [{"role": "user", "content": "What is 7 + 5?"}]
STORY: list[Any] = [{"role": "user", "content": "Tell me a long story about a fox named Anna in the forest."}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    names = (MODEL, "another-name")
    # every stream has comments between its events: clients pass over them
    settings = ServerSettings(served_model_names=names, access_log="off", stream_keep_alive_interval=0.002)
    with running_server(settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=SUM, temperature=0)
    choice = answer.choices[0]
    assert choice.message.content == "7 + 5 = 12"
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 10
    assert answer.usage.prompt_tokens_details is not None


def test_a_stream_is_the_answer_in_pieces(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=STORY, temperature=0, max_completion_tokens=60)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=STORY,
            temperature=0,
            max_completion_tokens=60,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *parts, usage = chunks
    assert usage.choices == []
    assert usage.usage is not None and whole.usage is not None
    assert usage.usage.completion_tokens == whole.usage.completion_tokens == 60
    assert parts[0].choices[0].delta.role == "assistant"
    assert all(part.usage is None for part in parts)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert [part.choices[0].finish_reason for part in parts][-1] == "length"
    assert all(part.choices[0].finish_reason is None for part in parts[:-1])
    assert len({part.id for part in chunks}) == 1


def test_several_choices_with_a_seed(client: OpenAI) -> None:
    def ask(stream: bool) -> list[str]:
        given: dict[str, Any] = {"model": MODEL, "messages": STORY, "n": 3, "temperature": 2.0, "seed": 5}
        given["max_tokens"] = 20
        if not stream:
            made = client.chat.completions.create(**given)
            assert [choice.index for choice in made.choices] == [0, 1, 2]
            return [choice.message.content or "" for choice in made.choices]
        texts = ["", "", ""]
        for chunk in client.chat.completions.create(**given, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        return texts

    first = ask(stream=False)
    assert len(set(first)) == 3
    assert ask(stream=False) == first
    assert ask(stream=True) == first


def test_stop_and_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=SUM, temperature=0, stop=[" ="], logprobs=True, top_logprobs=3
    )
    choice = answer.choices[0]
    assert choice.message.content == "7 + 5"
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(entry.token for entry in choice.logprobs.content).startswith("7 + 5")
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.bytes == list(entry.token.encode())
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)


def test_streamed_logprobs_are_the_same(client: OpenAI) -> None:
    given: dict[str, Any] = {"model": MODEL, "messages": SUM, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**given).choices[0].logprobs
    assert whole is not None and whole.content is not None
    streamed = [
        entry
        for chunk in client.chat.completions.create(**given, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or []
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.content]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in whole.content], abs=1e-4)


def test_completions(client: OpenAI) -> None:
    prompt = "<|im_start|>user\nWhat is 7 + 5?<|im_end|>\n<|im_start|>assistant\n"
    answer = client.completions.create(model=MODEL, prompt=[prompt, prompt], temperature=0, logprobs=2, echo=True)
    assert answer.object == "text_completion"
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.text == prompt + "7 + 5 = 12"
        found = choice.logprobs
        assert found is not None and found.tokens and found.text_offset and found.token_logprobs and found.top_logprobs
        assert len(found.tokens) == len(found.text_offset) == len(found.token_logprobs) == len(found.top_logprobs)
        assert found.token_logprobs[0] is None and None not in found.token_logprobs[1:]
        assert "".join(found.tokens).startswith(choice.text)
        for token, offset in zip(found.tokens[:-1], found.text_offset, strict=False):
            assert choice.text[offset : offset + len(token)] == token
    streamed = ["", ""]
    for chunk in client.completions.create(model=MODEL, prompt=[prompt, prompt], temperature=0, echo=True, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in answer.choices]


def test_scoring_a_prompt(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="What is 7 + 5?", max_tokens=0, echo=True, logprobs=1)
    assert answer.choices[0].text == "What is 7 + 5?"
    found = answer.choices[0].logprobs
    assert found is not None and "".join(found.tokens or []) == "What is 7 + 5?"
    assert answer.usage is not None and answer.usage.completion_tokens == 0


def test_parse(client: OpenAI) -> None:
    class Person(pydantic.BaseModel):
        name: str
        age: int

    prompt = "Extract name and age as JSON: Mia is 34 years old and lives in Oslo."
    answer = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": prompt}], response_format=Person, temperature=0
    )
    assert answer.choices[0].message.parsed == Person(name="Mia", age=34)


def tool_sample() -> tuple[list[Any], list[Any]]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "The weather in a city.", "parameters": parameters}
    return [{"role": "user", "content": "How is the weather in Porto?"}], [{"type": "function", "function": function}]


def test_tools_there_and_back(client: OpenAI) -> None:
    messages, tools = tool_sample()
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=tools, temperature=0)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name in [tool["function"]["name"] for tool in tools]
    assert json.loads(call.function.arguments) == {"city": "Porto"}

    id_and_name: list[Any] = []
    arguments = ""
    for chunk in client.chat.completions.create(
        model=MODEL, messages=messages, tools=tools, temperature=0, stream=True
    ):
        for delta in chunk.choices[0].delta.tool_calls or []:
            assert delta.function is not None
            if delta.id is not None:
                id_and_name.append((delta.id, delta.function.name))
            arguments += delta.function.arguments or ""
        last = chunk
    assert [name for _, name in id_and_name] == [call.function.name]
    assert arguments == call.function.arguments
    assert last.choices[0].finish_reason == "tool_calls"

    messages += [choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "It is done."}]
    final = client.chat.completions.create(model=MODEL, messages=messages, tools=tools, temperature=0)
    assert final.choices[0].message.content


def test_tool_choice(client: OpenAI) -> None:
    _, tools = tool_sample()
    name = tools[-1]["function"]["name"]
    named: Any = {"type": "function", "function": {"name": name}}
    for choice in ("required", named):
        answer = client.chat.completions.create(
            model=MODEL, messages=SUM, tools=tools, tool_choice=choice, temperature=0, max_tokens=200
        )
        calls = answer.choices[0].message.tool_calls
        assert calls
        assert choice == "required" or [call.function.name for call in calls if call.type == "function"] == [name]
    answer = client.chat.completions.create(model=MODEL, messages=SUM, tools=tools, tool_choice="none", temperature=0)
    assert answer.choices[0].message.content == "7 + 5 = 12"


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "another-name"]
    assert client.models.retrieve("another-name").id == "another-name"
    answer = client.chat.completions.create(model="another-name", messages=SUM, temperature=0)
    assert answer.model == "another-name"
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="gpt-9", messages=SUM)
    assert raised.value.code == "model_not_found"


def test_errors_are_the_clients_own(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=MODEL, messages=SUM, temperature=-1)
    assert raised.value.param == "temperature"
    assert raised.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens") as raised:
        client.completions.create(model=MODEL, prompt=[5] * 3000)
    assert raised.value.code == "context_length_exceeded"


def test_async_streams_side_by_side(server: RunningServer) -> None:
    async def ask(client: AsyncOpenAI, number: int) -> str:
        messages: list[Any] = [{"role": "user", "content": f"What is {number} + 5?"}]
        stream = await client.chat.completions.create(model=MODEL, messages=messages, temperature=0, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(8)))

    texts = asyncio.run(main())
    assert [text.split("=")[-1].strip() for text in texts] == [str(number + 5) for number in range(8)]


LONG: dict[str, Any] = {"model": MODEL, "ignore_eos": True, "max_tokens": 1900, "temperature": 1.0}


@pytest.mark.parametrize("more", [{}, {"n": 3}], ids=["one", "n"])
def test_leaving_a_stream_aborts_it(client: OpenAI, server: RunningServer, more: dict[str, Any]) -> None:
    body = {"ignore_eos": True}
    stream = client.chat.completions.create(
        model=MODEL, messages=STORY, max_tokens=1900, stream=True, extra_body=body, **more
    )
    for _ in range(3):
        next(iter(stream))
    assert len(server.engine._requests) >= 1
    stream.close()
    wait_until_idle(server)


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": "Once"},
        {"prompt": ["Once", "Twice"]},
        {"prompt": "Once", "n": 4},
        {"prompt": ["a", "b"], "stream": True},
    ],
    ids=["one", "prompts", "n", "streamed prompts"],
)
def test_leaving_without_an_answer_aborts(server: RunningServer, more: dict[str, Any]) -> None:
    with httpx.Client(base_url=server.url, timeout=0.3) as client, suppress(httpx.ReadTimeout):
        with client.stream("POST", "/v1/completions", json={**LONG, **more}) as response:
            next(response.iter_raw())
        assert more.get("stream"), "there is an answer already: nothing was left"
    wait_until_idle(server)
