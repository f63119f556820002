"""Values as clients write them, in all APIs: what is another spelling is taken, and what is wrong is one clear error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from inflight.entrypoints.anthropic import protocol as anthropic
from inflight.entrypoints.fields.strict_model import StrictModel
from inflight.entrypoints.ollama import protocol as ollama
from inflight.entrypoints.openai import protocol as openai
from inflight.entrypoints.pooling_api import protocol as pooling
from inflight.entrypoints.responses_api import protocol as responses
from tests.unit.entrypoints.api_client import MAX_MODEL_LEN, MODEL, Api, serving

CHAT, TEXT, RESPONSES, MESSAGES, OLLAMA = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
)
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
BASE: dict[str, dict[str, Any]] = {
    CHAT: HELLO,
    TEXT: {"prompt": "x"},
    RESPONSES: {"input": "x"},
    MESSAGES: {"model": MODEL, "max_tokens": 20, **HELLO},
    OLLAMA: HELLO,
}
# the imports make all models known, whatever other tests import
API_PROTOCOLS = (anthropic, ollama, openai, pooling, responses)


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with serving() as made:
        yield made


def models(base: type[StrictModel] = StrictModel) -> Iterator[type[StrictModel]]:
    for each in base.__subclasses__():
        yield each
        yield from models(each)


def kinds(annotation: object) -> set[object]:
    return {annotation}.union(*map(kinds, get_args(annotation)))


INTEGERS = sorted(
    {
        (each.__module__, each.__qualname__, field.alias or name, each)
        for each in models()
        if each.__module__.startswith("inflight.")  # other tests have models of their own
        for name, field in each.model_fields.items()
        if int in kinds(field.annotation) and float not in kinds(field.annotation)
    },
    key=lambda case: case[:3],
)


@pytest.mark.parametrize(("name", "model"), [case[2:] for case in INTEGERS], ids=[".".join(c[1:3]) for c in INTEGERS])
def test_every_integer_may_be_written_as_a_whole_float(name: str, model: type[StrictModel]) -> None:
    def problems(value: object) -> list[Any]:
        try:
            model.model_validate({name: value})
        except ValidationError as error:
            return [each for each in error.errors() if each["loc"][0] == name]
        return []

    for whole in (3.0, 3e0, [3.0, 4]):
        plain = [3, 4] if isinstance(whole, list) else 3
        assert [each["type"] for each in problems(whole)] == [each["type"] for each in problems(plain)]
    assert not problems(3.0) or not problems([3.0])
    for wrong in (3.5, True, "3", float("inf"), float("nan"), [3.5], [True]):
        assert problems(wrong) or (isinstance(wrong, str) and name in ("prompt", "input"))


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, {"max_tokens": 9.0, "top_k": 3.0, "seed": 1e3, "n": 1.0}, {"max_tokens": 9, "top_k": 3, "seed": 1000}),
        (CHAT, {"stop_token_ids": [65.0], "min_tokens": 0.0}, {"stop_token_ids": (65,), "min_tokens": 0}),
        (CHAT, {"logit_bias": {"65.0": 1, "66": 2.0}}, {"logit_bias": {65: 1.0, 66: 2.0}}),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, {"max_tokens": 4}),
        (CHAT, {"max_tokens": 4, "max_completion_tokens": None}, {"max_tokens": 4}),
        (TEXT, {"prompt": [65.0, 66], "logprobs": 1.0}, {"logprobs": 1}),
        (RESPONSES, {"max_output_tokens": 9.0}, {"max_tokens": 9}),
        (MESSAGES, {"max_tokens": 9.0, "top_k": 2.0}, {"max_tokens": 9, "top_k": 2}),
        (OLLAMA, {"options": {"num_predict": 9.0, "seed": 5.0}}, {"max_tokens": 9, "seed": 5}),
        (CHAT, {"stop": [""]}, {"stop": ()}),
        (CHAT, {"stop": ""}, {"stop": ()}),
        (CHAT, {"stop": ["", "b"]}, {"stop": ("b",)}),
        (TEXT, {"stop": None}, {"stop": ()}),
        (MESSAGES, {"stop_sequences": ["", "b"]}, {"stop": ("b",)}),
        (OLLAMA, {"options": {"stop": ["", "b"]}}, {"stop": ("b",)}),
        (CHAT, {"functions": [], "function_call": "auto"}, {}),
        (
            CHAT,
            {"n": None, "top_p": None, "tools": None, "tool_choice": "auto", "response_format": {"type": "text"}},
            {},
        ),
        (CHAT, {"seed": -1}, {"seed": -1}),
    ],
)
def test_other_spellings_are_taken(api: Api, path: str, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    params = api.asked(path, {**BASE[path], **fields}).sampling.params
    for name, value in expected.items():
        found = getattr(params, name)
        assert (tuple(found or ()) if isinstance(value, tuple) else found) == value


@pytest.mark.parametrize(
    ("path", "name"), [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (TEXT, "max_tokens")]
)
def test_minus_one_allows_the_whole_context(api: Api, path: str, name: str) -> None:
    sampling = api.asked(path, {**BASE[path], name: -1}).sampling
    assert sampling.max_tokens == MAX_MODEL_LEN - len(api.core.prompts[-1])


WRONG = [
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"max_tokens": -2}, "max_tokens"),
    (CHAT, {"max_tokens": 12.5}, "max_tokens"),
    (CHAT, {"max_tokens": True}, "max_tokens"),
    (CHAT, {"max_tokens": 1e308}, "max_tokens"),
    (CHAT, {"seed": 2**63}, "seed"),
    (CHAT, {"temperature": "0.7"}, "temperature"),
    (CHAT, {"temperature": True}, "temperature"),
    (CHAT, {"logprobs": 0}, "logprobs"),
    (CHAT, {"logit_bias": {"65.5": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"65": 1, "65.0": 2}}, "logit_bias"),
    (CHAT, {"stop": [3]}, "stop[0]"),
    (CHAT, {"functions": [{"title": "f"}]}, "functions[0].name"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"user": 5}, "user"),
    (TEXT, {"prompt": [65.5]}, "prompt[0]"),
    (TEXT, {"stop_token_ids": [65, 65.5]}, "stop_token_ids[1]"),
    (RESPONSES, {"max_output_tokens": 12.5}, "max_output_tokens"),
]


@pytest.mark.parametrize(("path", "fields", "param"), WRONG)
def test_wrong_values_are_one_clear_error(api: Api, path: str, fields: dict[str, Any], param: str) -> None:
    answer = api.post(path, {**BASE[path], **fields})
    assert (answer.status, answer.error["param"]) == (400, param)


def test_huge_numbers_are_refused(api: Api) -> None:
    for number in (b"1e400", b"-1e400", b"9" * 400):
        for field in (b"max_tokens", b"temperature", b"seed"):
            body = b'{"prompt": "x", "%s": %s}' % (field, number)
            assert api.post(TEXT, body, {"content-type": "application/json"}).status == 400


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        ({"temp": 21, "wind": {"from": "N"}}, '{"temp": 21, "wind": {"from": "N"}}'),
        ({"ort": "Köln"}, '{"ort": "Köln"}'),
        ([1, "two"], '[1, "two"]'),
        ([{"temp": 21}], '[{"temp": 21}]'),
        (21.5, "21.5"),
        (False, "false"),
        ("text", "text"),
        ([{"type": "text", "text": "part"}], "part"),
    ],
)
def test_the_result_of_a_tool_may_be_any_json(api: Api, content: object, seen: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [*HELLO["messages"], {"role": "assistant", "tool_calls": [call]}]
    api.asked(CHAT, {"messages": [*history, {"role": "tool", "tool_call_id": "c", "content": content}]})
    prompt = bytes(token for token in api.core.prompts[-1] if token < 256).decode()
    assert seen in prompt.rpartition("<tool>")[2]


def test_results_of_the_other_apis_may_be_any_json(api: Api) -> None:
    result, seen = {"temp": 21, "ort": "Köln"}, '{"temp": 21, "ort": "Köln"}'
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    answer = {"type": "tool_result", "tool_use_id": "c", "content": result}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    bodies: dict[str, dict[str, Any]] = {
        MESSAGES: {"messages": [*HELLO["messages"], {"role": "assistant", "content": [use]}]},
        RESPONSES: {"input": [{"role": "user", "content": "x"}, call]},
        OLLAMA: {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]},
    }
    bodies[MESSAGES]["messages"].append({"role": "user", "content": [answer]})
    bodies[RESPONSES]["input"].append({"type": "function_call_output", "call_id": "c", "output": result})
    bodies[OLLAMA]["messages"].append({"role": "tool", "content": result})
    for path, body in bodies.items():
        api.asked(path, {**BASE[path], **body})
        assert seen in bytes(token for token in api.core.prompts[-1] if token < 256).decode()
    assert api.post(OLLAMA, {"messages": [{"role": "user", "content": result}]}).status == 400


def test_only_results_may_be_any_json(api: Api) -> None:
    for content in ({"a": 1}, 5, [1]):
        assert api.post(CHAT, {"messages": [{"role": "user", "content": content}]}).status == 400
    shown = [{"type": "image_url", "image_url": {"url": "u"}}]  # parts, and not a result that is a list
    answer = api.post(CHAT, {"messages": [{"role": "tool", "content": shown}]})
    assert (answer.status, answer.headers["x-ignored-fields"]) == (200, "messages[].content[] (image_url)")


def test_a_schema_needs_no_name(api: Api) -> None:
    wanted = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
    assert api.asked(CHAT, {**HELLO, "response_format": wanted}).sampling.params.structured_outputs is not None
    body = {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": "integer"}}}}
    assert api.asked(RESPONSES, body).sampling.params.structured_outputs is not None
