"""OpenAI's own Python SDK, in its current major version and in the previous one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from conversations import (
    EXTRACT,
    MAX_MODEL_LEN,
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
    Person,
    long_history,
    user,
)
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel


class GetWeather(BaseModel):
    """Get the weather in a city"""

    city: str


PYDANTIC_TOOL: Any = openai.pydantic_function_tool(GetWeather, name="get_weather")
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def client(base_url: str, api_key: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60) as made:
        yield made


def ask(client: OpenAI, text: str = SUM, **more: Any) -> Any:
    return client.chat.completions.create(messages=[user(text)], **{**GREEDY, **more})


# ---- answers ----------------------------------------------------------------------------------------------------------


def test_chat_and_its_usage(client: OpenAI) -> None:
    answer = ask(client)
    assert answer.choices[0].message.content == SUM_ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_completion(client: OpenAI) -> None:
    answer = client.completions.create(prompt=["Once upon a time", "One day"], max_tokens=8, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_stream_and_its_usage(client: OpenAI) -> None:
    chunks = list(ask(client, STORY, max_tokens=40, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == ask(client, STORY, max_tokens=40).choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 40
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_raw_response_and_request_id(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(messages=[user(SUM)], **GREEDY)  # type: ignore[arg-type]
    assert raw.headers["x-request-id"]
    assert raw.parse().choices[0].message.content == SUM_ANSWER


async def _answers(base_url: str, api_key: str) -> list[str | None]:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60) as client:
        request = {**GREEDY, "messages": [user(SUM)]}
        answers = await asyncio.gather(*[client.chat.completions.create(**request) for _ in range(8)])
        return [answer.choices[0].message.content for answer in answers]


def test_async_client_with_many_requests_at_once(base_url: str, api_key: str) -> None:
    assert asyncio.run(_answers(base_url, api_key)) == [SUM_ANSWER] * 8


def test_models(client: OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def test_abort_in_mid_stream_frees_the_request(client: OpenAI, url: str) -> None:
    stream = ask(client, STORY, max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    assert ask(client).choices[0].message.content == SUM_ANSWER
    end = time.monotonic() + 300
    while True:
        metrics = httpx.get(f"{url}/metrics", headers=client.auth_headers).text
        running = [line for line in metrics.splitlines() if line.startswith("inflight:num_requests_running")]
        if running and all(float(line.split()[-1]) == 0 for line in running):
            break
        assert time.monotonic() < end, running
        time.sleep(0.1)


# ---- tools and structured output ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", [WEATHER_TOOL, STRICT_WEATHER_TOOL], ids=["tool", "strict tool"])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tool_loop(client: OpenAI, tool: Any, choice: str) -> None:
    first = ask(client, WEATHER_QUESTION, tools=[tool], tool_choice=choice)
    assert first.choices[0].finish_reason == "tool_calls"
    (call,) = first.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == WEATHER_CALL
    result = {"role": "tool", "tool_call_id": call.id, "content": WEATHER_RESULT}
    messages = [user(WEATHER_QUESTION), first.choices[0].message, result]
    answer = client.chat.completions.create(messages=messages, tools=[tool], **GREEDY)
    assert answer.choices[0].message.content == WEATHER_ANSWER


def test_parse(client: OpenAI) -> None:
    answer = client.chat.completions.parse(messages=[user(EXTRACT)], response_format=Person, **GREEDY)  # type: ignore[list-item]
    assert answer.choices[0].message.parsed == Person(**PERSON)  # type: ignore[arg-type]


def test_message_of_parse_goes_back_into_the_history(client: OpenAI) -> None:
    first = client.chat.completions.parse(messages=[user(EXTRACT)], response_format=Person, **GREEDY)  # type: ignore[list-item]
    messages: Any = [user(EXTRACT), first.choices[0].message, user(SUM)]
    answer = client.chat.completions.create(messages=messages, **GREEDY)
    assert answer.choices[0].message.content == SUM_ANSWER


def test_call_of_parse_goes_back_into_the_history(client: OpenAI) -> None:
    tools = [PYDANTIC_TOOL]
    first = client.chat.completions.parse(messages=[user(WEATHER_QUESTION)], tools=tools, **GREEDY)  # type: ignore[list-item]
    message = first.choices[0].message
    assert message.tool_calls
    assert message.tool_calls[0].function.parsed_arguments == GetWeather(city="Oslo")
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": WEATHER_RESULT}
    messages: Any = [user(WEATHER_QUESTION), message, result]
    answer = client.chat.completions.parse(messages=messages, tools=tools, **GREEDY)
    assert answer.choices[0].message.content == WEATHER_ANSWER


def test_message_of_the_stream_helper_goes_back_into_the_history(client: OpenAI) -> None:
    messages: Any = [user(EXTRACT)]
    with client.chat.completions.stream(messages=messages, response_format=Person, **GREEDY) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert "content.delta" in events
    assert message.parsed == Person(**PERSON)  # type: ignore[arg-type]
    answer = client.chat.completions.create(messages=[*messages, message, user(SUM)], **GREEDY)
    assert answer.choices[0].message.content == SUM_ANSWER


def test_call_of_the_stream_helper_goes_back_into_the_history(client: OpenAI) -> None:
    messages: Any = [user(WEATHER_QUESTION)]
    with client.chat.completions.stream(messages=messages, tools=[PYDANTIC_TOOL], **GREEDY) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls
    assert message.tool_calls[0].function.parsed_arguments == GetWeather(city="Oslo")
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": WEATHER_RESULT}
    answer = client.chat.completions.create(messages=[*messages, message, result], tools=[PYDANTIC_TOOL], **GREEDY)
    assert answer.choices[0].message.content == WEATHER_ANSWER


@pytest.mark.parametrize("tool", [PYDANTIC_TOOL, WEATHER_TOOL], ids=["strict tool", "tool"])
def test_an_output_format_and_tools_give_a_call_or_the_format(client: OpenAI, tool: Any) -> None:
    """The format holds for texts only; the model may still call a tool."""
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON_SCHEMA, "strict": True}}
    called = ask(client, WEATHER_QUESTION, tools=[tool], response_format=schema).choices[0]
    assert called.finish_reason == "tool_calls"
    assert json.loads(called.message.tool_calls[0].function.arguments) == WEATHER_CALL
    answered = ask(client, EXTRACT, tools=[tool], response_format=schema).choices[0]
    if answered.finish_reason == "tool_calls":  # the model may choose either
        assert set(json.loads(answered.message.tool_calls[0].function.arguments)) == {"city"}
    else:
        Person.model_validate_json(answered.message.content)


def test_a_json_object_and_a_required_tool_give_a_call(client: OpenAI) -> None:
    format = {"type": "json_object"}
    choice = ask(
        client, WEATHER_QUESTION, tools=[WEATHER_TOOL], tool_choice="required", response_format=format
    ).choices[0]
    assert json.loads(choice.message.tool_calls[0].function.arguments) == WEATHER_CALL


@pytest.mark.parametrize(
    "keyword",
    [
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}},
        {"type": "integer", "format": "int32"},
        {"type": "number", "format": "double"},
        {"type": "string", "format": "binary"},
        {"type": "string", "format": "a-name-of-ours"},
    ],
    ids=lambda keyword: "-".join(name for name in keyword if name not in ("type", "items", "additionalProperties")),
)
@pytest.mark.parametrize("where", ["required", "strict", "response_format"])
def test_schema_keywords_that_cannot_be_enforced(client: OpenAI, keyword: Any, where: str) -> None:
    schema = {"type": "object", "properties": {"value": keyword}, "required": ["value"], "additionalProperties": False}
    more: dict[str, Any]
    if where == "response_format":
        more = {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        }
    else:
        function = {"name": "set_value", "parameters": schema, **({"strict": True} if where == "strict" else {})}
        more = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    choice = ask(client, max_tokens=300, **more).choices[0]
    assert choice.message.tool_calls or choice.message.content


def test_not_in_a_schema_that_is_not_strict(client: OpenAI) -> None:
    """The keyword is ignored if the schema is not strict. A strict schema with it is refused, as by OpenAI."""
    schema = {"type": "object", "properties": {"value": {"type": "string", "not": {"const": "nothing"}}}}
    function: dict[str, Any] = {"name": "set_value", "parameters": {**schema, "required": ["value"]}}
    more = {"tool_choice": "required", "max_tokens": 300}
    assert ask(client, tools=[{"type": "function", "function": function}], **more).choices[0].message.tool_calls
    strict = {**function, "strict": True, "parameters": {**function["parameters"], "additionalProperties": False}}
    with pytest.raises(openai.BadRequestError, match="not is not supported"):
        ask(client, tools=[{"type": "function", "function": strict}], **more)


# ---- conversations that grow --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_fixed_max_tokens_while_the_conversation_grows(client: OpenAI, field: str) -> None:
    messages = long_history()
    answer = client.chat.completions.create(messages=messages, **{field: MAX_MODEL_LEN - 48}, **GREEDY)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 1000
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content


def test_fixed_max_tokens_end_with_the_context(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=long_history(), max_tokens=MAX_MODEL_LEN - 48, extra_body={"ignore_eos": True}, **GREEDY
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == MAX_MODEL_LEN
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("arguments", ['{"city": ', "{oops", "", "not JSON", "[1]", "null"])
def test_malformed_arguments_in_the_history(client: OpenAI, arguments: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages: Any = [
        user(WEATHER_QUESTION),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "error: the arguments are not a JSON object"},
        user(WEATHER_QUESTION),
    ]
    answer = client.chat.completions.create(messages=messages, tools=[WEATHER_TOOL], **GREEDY)  # type: ignore[list-item]
    assert answer.choices[0].finish_reason in ("stop", "tool_calls")


@pytest.mark.parametrize(
    "extra",
    [
        {"include_reasoning": True},
        {"truncate_prompt_tokens": None},
        {"prompt_cache_retention": "24h"},
        {"moderation": {"model": "any"}},
        {"metadata": {"a": "b"}},
        {"cache_control": {"type": "ephemeral"}},
        {"a_field_of_another_engine": 1},
        {"another_one": None},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_unknown_fields_of_the_request_are_ignored(client: OpenAI, extra: Any) -> None:
    assert ask(client, extra_body=extra).choices[0].message.content == SUM_ANSWER


def test_unknown_fields_of_messages_are_ignored(client: OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "Be concise.", "cache_control": {"type": "ephemeral"}},
        {**user(SUM), "id": "msg_1", "metadata": {"a": 1}},
        {
            "role": "assistant",
            "content": SUM_ANSWER,
            "parsed": None,
            "provider_specific_fields": {"x": 1},
            "annotations": [],
            "refusal": None,
            "audio": None,
            "function_call": None,
        },
        {"role": "user", "content": [{"type": "text", "text": SUM, "cache_control": {"type": "ephemeral"}}]},
    ]
    answer = client.chat.completions.create(messages=messages, **GREEDY)
    assert answer.choices[0].message.content == SUM_ANSWER


def test_unknown_fields_of_tools_are_ignored(client: OpenAI) -> None:
    tool: Any = {
        **WEATHER_TOOL,
        "cache_control": {"type": "ephemeral"},
        "function": {**WEATHER_TOOL["function"], "returns": {"type": "string"}},
    }
    assert ask(client, WEATHER_QUESTION, tools=[tool]).choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "more",
    [
        {"store": True},
        {"store": False},
        {"verbosity": "low"},
        {"verbosity": "high"},
        {"service_tier": "flex"},
        {"service_tier": "priority"},
        {"top_logprobs": 0},
    ],
    ids=str,
)
def test_values_that_openai_takes(client: OpenAI, more: Any) -> None:
    assert ask(client, extra_body=more).choices[0].message.content == SUM_ANSWER


# ---- errors -------------------------------------------------------------------------------------------------------------


def test_wrong_key(base_url: str) -> None:
    with OpenAI(base_url=base_url, api_key="wrong-key", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match="Incorrect API key provided") as caught:
            ask(client)
        assert caught.value.code == "invalid_api_key"
        assert "wrong-key" not in caught.value.message


@pytest.mark.parametrize("how", ["chat", "completion", "stream"])
def test_context_overflow(client: OpenAI, how: str) -> None:
    words = f"This model's maximum context length is {MAX_MODEL_LEN} tokens"
    with pytest.raises(openai.BadRequestError, match=words) as caught:  # noqa: PT012  # one call, in three ways
        if how == "completion":
            client.completions.create(prompt=TOO_LONG, **GREEDY)
        else:
            ask(client, TOO_LONG, stream=how == "stream")
    assert caught.value.code == "context_length_exceeded"


def test_unknown_model(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, model="another")
    assert caught.value.code == "model_not_found"


def test_wrong_value(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ask(client, temperature=-1)


def test_timeout_of_the_client(client: OpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        ask(client, STORY, max_tokens=1500, extra_body={"ignore_eos": True}, timeout=0.2)


# ---- the Responses API --------------------------------------------------------------------------------------------------


def test_responses_and_their_stream(client: OpenAI) -> None:
    response = client.responses.create(input=SUM, **GREEDY)
    assert (response.output_text, response.status) == (SUM_ANSWER, "completed")
    with client.responses.stream(input=SUM, **GREEDY) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == SUM_ANSWER


@pytest.mark.parametrize("strict", [True, False])
def test_responses_call_tools(client: OpenAI, strict: bool) -> None:
    tool: Any = {"type": "function", **WEATHER_TOOL["function"], "strict": strict}
    history: Any = [user(WEATHER_QUESTION)]
    with client.responses.stream(input=history, tools=[tool], **GREEDY) as stream:
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == WEATHER_CALL
    history += [call, {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER_RESULT}]
    assert client.responses.create(input=history, tools=[tool], **GREEDY).output_text == WEATHER_ANSWER


def test_responses_are_stored(client: OpenAI) -> None:
    first = client.responses.create(input=SUM, background=True, **GREEDY)
    while first.status in ("queued", "in_progress"):
        time.sleep(0.05)
        first = client.responses.retrieve(first.id)
    assert first.output_text == SUM_ANSWER
    second = client.responses.create(input=SUM, previous_response_id=first.id, **GREEDY)
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.type for item in items] == ["message"] * 3
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_responses_are_parsed(client: OpenAI) -> None:
    parsed = client.responses.parse(input=EXTRACT, text_format=Person, **GREEDY).output_parsed
    assert parsed == Person(**PERSON)  # type: ignore[arg-type]


# ---- streams of load generators -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["words", "none"])
def test_a_completion_stream_has_a_chunk_for_each_token(client: OpenAI, url: str, text: str) -> None:
    """A token without text has a chunk, too: load generators take the time of the first chunk as that of the first token."""
    num_tokens = 20
    more: dict[str, Any] = {"ignore_eos": True}
    if text == "none":  # the text has no special tokens
        body = {"model": MODEL, "prompt": "<|im_start|>"}
        ids = httpx.post(f"{url}/tokenize", json=body, headers=client.auth_headers).json()["tokens"]
        assert len(ids) == 1
        more["allowed_token_ids"] = ids
    stream = client.completions.create(
        prompt="Once upon",
        max_tokens=num_tokens,
        stream=True,
        extra_body=more,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    chunks = list(stream)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == num_tokens
    # a client that reads slowly may get two tokens in one chunk
    assert num_tokens / 2 <= len([chunk for chunk in chunks if chunk.choices]) <= num_tokens + 1
