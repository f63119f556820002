"""What a request says about thoughts, in the words of any API, holds in each API, or is refused: a table of spellings and
endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from inflight.entrypoints.anthropic.protocol import MessagesRequest
from inflight.entrypoints.anthropic.translation import thoughts_of_message
from inflight.entrypoints.fields.constraint_fields import ConstraintFields, Constraints
from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.thinking_fields import ThinkingFields
from inflight.entrypoints.http.thinking import EFFORT_BUDGETS, Thoughts, thoughts_of
from inflight.entrypoints.ollama.protocol import ChatRequest, GenerateRequest
from inflight.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from inflight.entrypoints.responses_api.protocol import ResponsesRequest
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.sampling_params import SamplingParams
from tests.unit.entrypoints.api_client import Api, serving
from tests.unit.entrypoints.fields.test_constraint_fields import ENDPOINTS
from tests.unit.entrypoints.http.test_thinking import PLAIN, THINKS
from tests.unit.parsers.test_selector import TEMPLATES

RAW = {"prompt": "x", "stream": False, "raw": True}
PATHS = [(path, body) for path, body in ENDPOINTS.items()] + [("/api/generate", RAW)]
IDS = [*ENDPOINTS, "/api/generate raw"]
LOW = EFFORT_BUDGETS["low"]
# a spelling -> the most tokens of reasoning
SPELLINGS: list[tuple[dict[str, Any], int | None]] = [
    *(({name: 7}, 7) for name in ThinkingFields.model_fields if "budget" in name or "max" in name),
    ({"thinking_token_budget": 0}, 0),
    ({"thinking_token_budget": -1}, -1),
    ({"thinking_token_budget": 7.0}, 7),
    ({"reasoning": {"max_tokens": 7}}, 7),
    ({"thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
    ({"thinking": {"type": "enabled", "token_budget": 7}}, 7),
    ({"thinking": {"budget_tokens": 7}}, 7),
    ({"chat_template_kwargs": {"thinking_budget": 7}}, 7),
    ({"chat_template_kwargs": {"thinking_token_budget": 7.0}}, 7),
    ({"thinking": {"type": "disabled"}}, 0),
    ({"thinking": {"type": "disabled", "budget_tokens": 9}}, 0),
    ({"think": False}, 0),
    ({"think": "none"}, 0),
    ({"think": "low"}, LOW),
    ({"enable_thinking": False}, 0),
    ({"reasoning": {"enabled": False}}, 0),
    ({"reasoning": {"effort": "none"}}, 0),
    ({"reasoning": {"effort": "low"}}, LOW),
    ({"reasoning_effort": "none"}, 0),
    ({"reasoning_effort": "low"}, LOW),
    ({"output_config": {"effort": "low"}}, LOW),
    ({"chat_template_kwargs": {"enable_thinking": False}}, 0),
    ({"chat_template_kwargs": {"thinking": False}}, 0),
    ({"chat_template_kwargs": {"reasoning_effort": "low"}}, LOW),
    ({"options": {"thinking_token_budget": 7}}, 7),
    ({"options": {"thinking_budget": 7}}, 7),
    ({"options": {"think": False}}, 0),
    ({"options": {"reasoning_effort": "low"}}, LOW),
    ({"think": True}, None),
    ({"reasoning_effort": "max"}, None),
    ({"thinking_budget": 7, "reasoning_effort": "high"}, 7),
    ({"thinking_budget": 7, "options": {"thinking_budget": 7}}, 7),
    ({"thinking_budget": None, "thinking": None, "think": None, "reasoning": {}}, None),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    *(({name: -2}, name) for name in ThinkingFields.model_fields if "budget" in name or "max" in name),
    ({"thinking_budget": "7"}, "thinking_budget"),
    ({"thinking_budget": True}, "thinking_budget"),
    ({"reasoning_budget": 7.5}, "reasoning_budget"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": "7"}}, "thinking.budget_tokens"),
    ({"thinking": "low"}, "thinking"),
    ({"reasoning": {"max_tokens": -2}}, "reasoning.max_tokens"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort"),
    ({"reasoning": "low"}, "reasoning"),
    ({"think": 5}, "think"),
    ({"enable_thinking": "false"}, "enable_thinking"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"output_config": {"effort": 3}}, "output_config.effort"),
    ({"chat_template_kwargs": {"enable_thinking": "false"}}, "chat_template_kwargs.enable_thinking"),
    ({"chat_template_kwargs": {"thinking": 0}}, "chat_template_kwargs.thinking"),
    ({"chat_template_kwargs": {"thinking_budget": "7"}}, "chat_template_kwargs.thinking_budget"),
    ({"chat_template_kwargs": {"reasoning_effort": 5}}, "chat_template_kwargs.reasoning_effort"),
    ({"options": {"thinking_budget": -2}}, "options.thinking_budget"),
    ({"options": {"think": 5}}, "options.think"),
    ({"thinking_token_budget": 5, "reasoning": {"max_tokens": 6}}, "reasoning.max_tokens"),
    ({"thinking_token_budget": 5, "options": {"thinking_budget": 6}}, "options.thinking_budget"),
    ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "thinking.type"),
    ({"think": True, "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
    ({"think": True, "reasoning_effort": "none"}, "think"),
]


def thoughts(path: str, given: dict[str, Any]) -> Thoughts:
    """What a request says, on the way that it takes in its API."""
    if path == "/v1/messages":
        return thoughts_of_message(MessagesRequest.model_validate(given))
    if path == "/v1/responses":
        return thoughts_of(ResponsesRequest.model_validate(given))
    if path == "/v1/completions":
        return thoughts_of(CompletionRequest.model_validate(given))
    if path == "/v1/chat/completions":
        return thoughts_of(ChatCompletionRequest.model_validate(given))
    return thoughts_of((ChatRequest if path == "/api/chat" else GenerateRequest).model_validate(given))


@pytest.mark.parametrize(("path", "beside"), PATHS, ids=IDS)
def test_every_spelling_holds_in_every_api(path: str, beside: dict[str, Any]) -> None:
    for fields, budget in SPELLINGS:
        found = thoughts(path, {**beside, **fields})
        params, ignored = found.bound(SamplingParams(), THINKS, writes_efforts=False)
        assert (params.thinking_token_budget, ignored) == (budget, ()), fields


@pytest.mark.parametrize(("path", "beside"), PATHS, ids=IDS)
def test_a_wrong_value_is_an_error_that_names_the_field(path: str, beside: dict[str, Any]) -> None:
    for fields, param in WRONG:
        with pytest.raises((FieldError, ValidationError)) as refused:
            thoughts(path, {**beside, **fields})
        places = (
            [refused.value.param]
            if isinstance(refused.value, FieldError)
            else [".".join(map(str, each["loc"])) for each in refused.value.errors()]
        )
        assert any(place.startswith(param) for place in places), (fields, places)


@pytest.mark.parametrize(("path", "beside"), PATHS, ids=IDS)
def test_a_model_whose_reasoning_is_not_found(path: str, beside: dict[str, Any]) -> None:
    """A number is refused; only what clients of Anthropic's API must send is ignored and reported. An effort is reported."""
    for fields, budget in SPELLINGS:
        found = thoughts(path, {**beside, **fields})
        if found.budget is None or found.budget < 0 or found.is_on is False:
            _, ignored = found.bound(SamplingParams(), PLAIN, writes_efforts=False)
            assert bool(ignored) is (budget == LOW), fields
        elif path == "/v1/messages" and "budget_tokens" in fields.get("thinking", {}):
            _, ignored = found.bound(SamplingParams(), PLAIN, writes_efforts=False)
            assert ignored == ("thinking.budget_tokens",)
        else:
            with pytest.raises(FieldError):
                found.bound(SamplingParams(), PLAIN, writes_efforts=False)


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with serving(ServerSettings(access_log="off", reasoning_parser="qwen3"), template=TEMPLATES["r1"][0]) as made:
        yield made


@pytest.mark.parametrize(("path", "beside"), PATHS, ids=IDS)
def test_the_server_enforces_it(api: Api, path: str, beside: dict[str, Any]) -> None:
    api.core.texts = ("!",)
    for fields, budget in (
        ({"max_thinking_tokens": 7}, 7),
        ({"think": False}, 0),
        ({"reasoning": {"effort": "low"}}, LOW),
    ):
        answer = api.post(path, {**beside, **fields})
        assert answer.status == 200 and "x-ignored-fields" not in answer.headers
        assert api.core.sequences[-1].sampling.params.thinking_token_budget == budget
    api.core.forget()
    for fields, param in (
        ({"thinking_budget": -2}, "thinking_budget"),
        ({"chat_template_kwargs": {"enable_thinking": "false"}}, "chat_template_kwargs.enable_thinking"),
    ):
        answer = api.post(path, {**beside, **fields})
        assert answer.status == 400 and param in answer.text


@pytest.mark.parametrize(("path", "beside"), PATHS[:1] + PATHS[2:5], ids=[*IDS[:1], *IDS[2:5]])
def test_an_answer_without_its_reasoning(api: Api, path: str, beside: dict[str, Any]) -> None:
    on = {"thinking": {"type": "enabled"}, **({"max_tokens": 60} if path == "/v1/messages" else {})}
    api.core.texts = ("<think>Hm.</think>Hi!",)
    assert "Hm." in api.post(path, {**beside, **on}).text
    for fields in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        answer = api.post(path, {**beside, **on, **fields})
        assert "Hm." not in answer.text and "Hi!" in answer.text


def test_every_budget_has_a_spelling_here() -> None:
    names = {name for fields, _ in SPELLINGS for name in fields}
    assert names >= ThinkingFields.model_fields.keys() - {"include_reasoning"}
    assert ThinkingFields.model_fields.keys() <= Constraints.model_fields.keys() <= ConstraintFields.model_fields.keys()
