"""`SamplingFields`: the fields that decide how tokens are drawn, in all APIs, and the types that fields of requests share.

The fields have the bounds of `SamplingParams`, so that the OpenAPI document shows these bounds.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from inflight.entrypoints.fields.strict_model import StrictModel
from inflight.sampling_params import MAX_STOP_STRING_LENGTH, MAX_STOP_STRINGS, SamplingParams
from inflight.setting import settings_of
from inflight.structured_outputs_params import MAX_GRAMMAR_LENGTH

MAX_INT = 2**31 - 1
MAX_PRIORITY = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_LENGTH)]


def _without_empty(stop: object) -> object:
    """Leave empty strings out. They end no text, but a program sends one if its user has left a field empty."""
    if isinstance(stop, list):
        return [each for each in stop if each != ""]
    return None if stop == "" else stop


StopList = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), BeforeValidator(_without_empty)]
StopStrings = Annotated[StopString | StopList | None, BeforeValidator(_without_empty)]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]
Schema = dict[str, Any]  # Any: a JSON schema, checked where it is compiled


def sampling_field(name: str, description: str) -> Any:  # Any: as pydantic's own `Field`
    """A field for a number, with the bounds of the field `name` of `SamplingParams`."""
    declared = settings_of(SamplingParams)[name]
    low, high = declared.bounds
    if declared.excludes_low:
        return Field(None, gt=low, le=high, description=description)
    return Field(None, ge=low, le=high, description=description)


class SamplingFields(StrictModel):
    """How tokens are drawn. These fields have the same names in all APIs."""

    temperature: float | None = sampling_field("temperature", "0 is greedy.")
    top_p: float | None = sampling_field(
        "top_p", "Only the smallest set of most probable tokens with this total probability is kept."
    )
    top_k: int | None = sampling_field(
        "top_k", "Only this number of the most probable tokens is kept; 0 and -1 keep all."
    )
    min_p: float | None = sampling_field(
        "min_p", "Tokens with less than this share of the best token's probability are dropped."
    )
    presence_penalty: float | None = sampling_field(
        "presence_penalty", "Subtracted from the logit of each token that was emitted."
    )
    frequency_penalty: float | None = sampling_field(
        "frequency_penalty", "Subtracted from the logit of a token for each time that it was emitted."
    )
    seed: int | None = sampling_field("seed", "Makes the draws repeatable.")
