"""`Thoughts`: what a request says about thinking becomes a bound, variables of the template, a report or a refusal."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.http.thinking import EFFORT_BUDGETS, Thoughts, thoughts_of
from inflight.entrypoints.openai.protocol import ChatCompletionRequest
from inflight.parsers.selector import DetectedParsers
from inflight.sampling_params import SamplingParams
from tests.unit.entrypoints.refusals import refused

THINKS = DetectedParsers(None, "qwen3", None)
PLAIN = DetectedParsers("hermes", None, None)


def thoughts(**fields: Any) -> Thoughts:
    return thoughts_of(ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields}))


def bound(
    wish: Thoughts, parsers: DetectedParsers = THINKS, *, writes_efforts: bool = False
) -> tuple[int | None, tuple[str, ...]]:
    params, ignored = wish.bound(SamplingParams(temperature=0.5), parsers, writes_efforts=writes_efforts)
    assert params.temperature == 0.5
    return params.thinking_token_budget, ignored


BUDGETS: list[dict[str, Any]] = [
    {"thinking_token_budget": 7},
    {"thinking_budget": 7},
    {"thinking_budget_tokens": 7},
    {"reasoning_budget_tokens": 7},
    {"reasoning": {"max_tokens": 7}},
    {"thinking": {"type": "enabled", "budget_tokens": 7}},
    {"thinking": {"type": "adaptive", "budget_tokens": 7}, "reasoning": {"max_tokens": 7, "effort": "low"}},
    {"thinking_token_budget": 7, "reasoning_effort": "high"},
]


@pytest.mark.parametrize("fields", BUDGETS)
def test_a_number_of_tokens(fields: dict[str, Any]) -> None:
    assert bound(thoughts(**fields)) == bound(thoughts(**fields), writes_efforts=True) == (7, ())


@pytest.mark.parametrize("fields", BUDGETS)
def test_a_number_is_refused_if_the_reasoning_cannot_be_found(fields: dict[str, Any]) -> None:
    with pytest.raises(FieldError) as refused:
        bound(thoughts(**fields), PLAIN)
    name, _, member = refused.value.param.partition(".")
    assert name in fields and (not member or member in fields[name])


def test_no_limit_is_never_refused() -> None:
    assert bound(thoughts(thinking_token_budget=-1), PLAIN) == (-1, ())


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"enabled": False}},
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "disabled", "budget_tokens": 9}},
        {"enable_thinking": False},
    ],
)
def test_off(fields: dict[str, Any]) -> None:
    wish = thoughts(**fields)
    assert wish.template_variables["enable_thinking"] is False
    assert bound(wish) == bound(wish, writes_efforts=True) == (0, ())
    assert bound(wish, PLAIN) == (None, ())


def test_on_is_a_variable_of_the_template() -> None:
    for fields in ({"enable_thinking": True}, {"thinking": {"type": "enabled"}}, {"reasoning": {"enabled": True}}):
        wish = thoughts(**fields)
        assert wish.template_variables == {"enable_thinking": True, "thinking": True}
        assert bound(wish) == (None, ())


@pytest.mark.parametrize(("effort", "budget"), [*EFFORT_BUDGETS.items(), ("xhigh", None), ("max", None)])
def test_an_effort_is_a_bound_if_the_template_writes_none(effort: str, budget: int | None) -> None:
    for fields in ({"reasoning_effort": effort}, {"reasoning": {"effort": effort}}):
        wish = thoughts(**fields)
        assert wish.template_variables["reasoning_effort"] == effort
        assert bound(wish) == (budget, ())
        assert bound(wish, writes_efforts=True) == (0 if effort == "none" else None, ())


def test_an_effort_without_effect_is_reported() -> None:
    assert bound(thoughts(reasoning_effort="low"), PLAIN) == (None, ("reasoning_effort",))
    assert bound(thoughts(reasoning={"effort": "low"}), PLAIN) == (None, ("reasoning.effort",))
    assert bound(thoughts(reasoning_effort="some")) == (None, ("reasoning_effort",))
    assert bound(thoughts(reasoning_effort="low"), PLAIN, writes_efforts=True) == (None, ())


def test_a_budget_that_may_be_ignored_is_reported() -> None:
    wish = Thoughts(budget=5, budget_field="thinking.budget_tokens", may_ignore_budget=True)
    assert bound(wish, PLAIN) == (None, ("thinking.budget_tokens",))
    assert bound(wish) == (5, ())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking_token_budget": 5, "reasoning": {"max_tokens": 6}}, "reasoning.max_tokens"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "thinking.type"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], param: str) -> None:
    with refused(param):
        thoughts(**fields)
