"""`ThinkingFields`: what a request says about the model's thoughts, in the words of all APIs and engines. The requests of all
APIs have these fields, so that no bound is lost because a client uses the word of another API.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.sampling_fields import MAX_INT, sampling_field
from inflight.entrypoints.fields.strict_model import StrictModel, no_effect, optional
from inflight.entrypoints.whole_numbers import as_integers

ReasoningEffort = Annotated[str, Field(min_length=1, max_length=32)]
TEMPLATE_VARIABLES = "chat_template_kwargs"
# fields with a number of tokens
_BUDGETS = (
    "thinking_token_budget thinking_budget thinking_budget_tokens reasoning_budget reasoning_budget_tokens "
    "max_thinking_tokens"
).split()
# variables of chat templates that some clients set: they mean the same as the fields
_SWITCH_VARIABLES = ("enable_thinking", "thinking")
_BUDGET_VARIABLES = ("thinking_budget", "thinking_token_budget", "reasoning_budget")
_EFFORT_VARIABLES = ("reasoning_effort",)
THINKING_VARIABLES = frozenset({*_SWITCH_VARIABLES, *_BUDGET_VARIABLES, *_EFFORT_VARIABLES})


def _budget_field(whose: str) -> Any:  # Any: as pydantic's own `Field`
    return optional(f"{whose} name of thinking_token_budget.", ge=-1, le=MAX_INT)


class ReasoningOptions(StrictModel):
    """The form of OpenAI's Responses API (effort, summary) and of OpenRouter."""

    effort: ReasoningEffort | None = optional("The same as reasoning_effort.")
    max_tokens: int | None = optional("The same as thinking_token_budget.", ge=-1, le=MAX_INT)
    enabled: bool | None = optional("The same as enable_thinking.")
    exclude: bool | None = optional("True: the same as include_reasoning=false.")
    summary: str | None = no_effect("The answer has the reasoning itself, and no summary.")
    generate_summary: str | None = no_effect("Older name of summary.")
    context: str | None = no_effect("The chat template decides which reasoning of earlier turns it shows.")


class ThinkingOptions(StrictModel):
    """The form of Anthropic, DeepSeek, GLM, Cohere and others."""

    type: Literal["enabled", "adaptive", "auto", "disabled"] | None = optional("disabled: no thinking.")
    budget_tokens: int | None = optional("The same as thinking_token_budget.", ge=-1, le=MAX_INT)
    token_budget: int | None = optional("Cohere's name of budget_tokens.", ge=-1, le=MAX_INT)
    display: str | None = no_effect("Thoughts are always sent.")


class Wishes(NamedTuple):
    """Field -> what it says; None if the request does not have it. `switches`: whether the model is to think."""

    budgets: dict[str, int | None]
    efforts: dict[str, str | None]
    switches: dict[str, bool | None]

    def add(self, other: "Wishes", prefix: str = "") -> None:
        """Add what an object of the request says, whose fields have this prefix."""
        self.budgets.update({prefix + name: value for name, value in other.budgets.items()})
        self.efforts.update({prefix + name: value for name, value in other.efforts.items()})
        self.switches.update({prefix + name: value for name, value in other.switches.items()})


class ThinkingFields(StrictModel):
    thinking_token_budget: int | None = sampling_field(
        "thinking_token_budget",
        "The most tokens of the reasoning, which is then closed; -1: no limit. The server's reasoning_budget if left out.",
    )
    thinking_budget: int | None = _budget_field("Another")
    thinking_budget_tokens: int | None = _budget_field("llama.cpp's")
    reasoning_budget: int | None = _budget_field("llama.cpp's")
    reasoning_budget_tokens: int | None = _budget_field("llama.cpp's")
    max_thinking_tokens: int | None = _budget_field("NVIDIA's")
    reasoning_effort: ReasoningEffort | None = optional(
        "A variable of the chat template, such as low, high or max; none also switches thinking off. If the template has no "
        "such variable, it bounds the reasoning (docs/reasoning.md)."
    )
    enable_thinking: bool | None = optional("A variable of the chat template; false also forbids reasoning.")
    think: bool | ReasoningEffort | None = optional(
        "Ollama's name: true and false are enable_thinking, and a text, such as low, is also the reasoning_effort."
    )
    reasoning: ReasoningOptions | None = optional("effort, max_tokens and enabled, as in OpenRouter's API.")
    thinking: ThinkingOptions | None = optional("type and budget_tokens, as in Anthropic's API.")
    include_reasoning: bool | None = optional(
        "False: the answer leaves the reasoning out. The model thinks all the same."
    )

    @property
    def hides_reasoning(self) -> bool:
        return self.include_reasoning is False or (self.reasoning is not None and self.reasoning.exclude is True)

    def wishes(self) -> Wishes:
        reasoning = self.reasoning or ReasoningOptions()
        thinking = self.thinking or ThinkingOptions()
        thinks = self.think
        return Wishes(
            budgets={
                **{name: getattr(self, name) for name in _BUDGETS},
                "reasoning.max_tokens": reasoning.max_tokens,
                "thinking.budget_tokens": thinking.budget_tokens,
                "thinking.token_budget": thinking.token_budget,
            },
            efforts={
                "reasoning_effort": self.reasoning_effort,
                "reasoning.effort": reasoning.effort,
                "think": thinks if isinstance(thinks, str) else None,
            },
            switches={
                "enable_thinking": self.enable_thinking,
                "reasoning.enabled": reasoning.enabled,
                "thinking.type": None if self.thinking is None else thinking.type != "disabled",
                "think": thinks if isinstance(thinks, bool) or thinks is None else thinks != "none",
            },
        )


def wishes_of_variables(variables: Mapping[str, Any] | None) -> Wishes:  # Any: JSON, not checked yet
    """What the variables for the chat template say.

    Raises:
        FieldError: a value is wrong.
    """
    given = {name: value for name, value in (variables or {}).items() if value is not None}
    return Wishes(
        budgets=dict(_named(given, _BUDGET_VARIABLES, _as_budget)),
        efforts=dict(_named(given, _EFFORT_VARIABLES, _as_effort)),
        switches=dict(_named(given, _SWITCH_VARIABLES, _as_switch)),
    )


def unread_variables(variables: Mapping[str, Any] | None) -> tuple[str, ...]:
    """What is ignored of the variables where there is no chat template, as names for the answer's header."""
    if (variables or {}).keys() - THINKING_VARIABLES:
        return (TEMPLATE_VARIABLES,)
    return ()


def _named(given: Mapping[str, Any], names: tuple[str, ...], read: Any) -> Iterator[tuple[str, Any]]:
    for name in names:
        if name in given:
            where = f"{TEMPLATE_VARIABLES}.{name}"
            yield where, read(where, given[name])


def _as_budget(where: str, value: object) -> int:
    number = as_integers(value)
    if isinstance(number, bool) or not isinstance(number, int) or not -1 <= number <= MAX_INT:
        raise FieldError(where, f"{where}={value!r} is no number of tokens: give -1 or more, or leave it out")
    return number


def _as_effort(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise FieldError(where, f"{where}={value!r} is no effort: give a text such as 'low', or leave it out")
    return value


def _as_switch(where: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise FieldError(where, f"{where}={value!r} is no switch: give true or false, or leave it out")
    return value
