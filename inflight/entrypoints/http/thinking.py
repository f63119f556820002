"""What a request says about the model's thoughts, in the words of all APIs: a number of tokens, an effort, on or off.

| a request says | the reasoning has at most |
|---|---|
| a number of tokens | this number; -1: no limit |
| off (`thinking: {"type": "disabled"}`, `think: false`, the effort "none") | 0 tokens |
| an effort, and the chat template writes efforts | what the server's default says: the model knows what to do |
| another effort | `EFFORT_BUDGETS`; with an effort that is not in this table, what the server's default says |

A number of tokens comes before an effort.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from inflight.entrypoints.fields.constraint_fields import ConstraintFields
from inflight.entrypoints.fields.field_error import FieldError
from inflight.parsers.selector import DetectedParsers
from inflight.sampling_params import SamplingParams

BUDGET = "thinking_token_budget"
# The most tokens of the reasoning for an effort, if the chat template writes no efforts.
EFFORT_BUDGETS: Mapping[str, int] = {"none": 0, "minimal": 512, "low": 1024, "medium": 8192, "high": 24576}
_UNLIMITED_EFFORTS = ("xhigh", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Thoughts:
    """
    Attributes:
        budget: a number of tokens; None if the request names none.
        effort: a word such as "low"; None if the request names none.
        is_on: whether the request switches thinking on or off; None if it says nothing about it.
        budget_field, effort_field: the fields that say so, for errors and reports.
        may_ignore_budget: whether the budget is only reported as ignored, instead of refused, if the reasoning of the model
            cannot be found.
    """

    budget: int | None = None
    effort: str | None = None
    is_on: bool | None = None
    budget_field: str = BUDGET
    effort_field: str = "reasoning_effort"
    may_ignore_budget: bool = False

    @property
    def template_variables(self) -> dict[str, Any]:  # Any: JSON
        """The variables with which templates choose an effort (gpt-oss), and switch thinking on and off (Qwen, DeepSeek)."""
        found: dict[str, Any] = {}
        if self.is_on is not None:
            found |= dict.fromkeys(("enable_thinking", "thinking"), self.is_on)
        if self.effort is not None:
            found["reasoning_effort"] = self.effort
            if self.effort == "none":
                found["enable_thinking"] = False
        return found

    def bound(
        self, params: SamplingParams, parsers: DetectedParsers, *, writes_efforts: bool
    ) -> tuple[SamplingParams, tuple[str, ...]]:
        """Returns the parameters with the budget, and the fields that have no effect.

        Args:
            writes_efforts: whether an effort changes what the chat template writes.

        Raises:
            FieldError: the request has a budget, but the reasoning of the model cannot be found.
        """
        is_found = parsers.reasoning is not None
        if self.is_on is False or self.effort == "none":
            return (replace(params, thinking_token_budget=0) if is_found else params), ()
        if self.budget is not None:
            if is_found or self.budget < 0:
                return replace(params, thinking_token_budget=self.budget), ()
            if self.may_ignore_budget:
                return params, (self.budget_field,)
            raise FieldError(
                self.budget_field,
                f"{self.budget_field} needs a model whose reasoning can be found, and no reasoning parser fits the chat "
                "template of this model: leave it out, or start the server with --reasoning-parser",
            )
        if self.effort is None or writes_efforts or self.effort in _UNLIMITED_EFFORTS:
            return params, ()
        if not is_found or self.effort not in EFFORT_BUDGETS:
            return params, (self.effort_field,)
        return replace(params, thinking_token_budget=EFFORT_BUDGETS[self.effort]), ()


def thoughts_of(body: ConstraintFields) -> Thoughts:
    """What a request says, in the words of all APIs.

    Raises:
        FieldError: a value is wrong, or two fields contradict each other.
    """
    wishes = body.wishes()
    budget_field, budget = _the_one(wishes.budgets)
    effort_field, effort = _the_one(wishes.efforts)
    switch_field, is_on = _the_one(wishes.switches)
    if effort == "none" and is_on:
        raise FieldError(
            switch_field, f"{switch_field} and {effort_field}='none' contradict each other; give one of them"
        )
    return Thoughts(
        budget=budget,
        effort=effort,
        is_on=is_on,
        budget_field=budget_field or BUDGET,
        effort_field=effort_field or "reasoning_effort",
    )


def _the_one(given: Mapping[str, Any]) -> tuple[str, Any]:  # Any: the type of the fields
    """The first field that is given, and its value; ("", None) if none is.

    Raises:
        FieldError: another field has another value.
    """
    found = [(name, value) for name, value in given.items() if value is not None]
    for name, value in found[1:]:
        if value != found[0][1]:
            first, other = found[0]
            raise FieldError(name, f"{name}={value!r} and {first}={other!r} differ; give one of them")
    return found[0] if found else ("", None)
