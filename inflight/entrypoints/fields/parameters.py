"""`sampling_params`: the sampling parameters that the fields of a request give."""

from dataclasses import replace
from typing import Any

from inflight.entrypoints.fields.constraint_fields import ConstraintFields
from inflight.sampling_params import SamplingParams
from inflight.setting import settings_of


def sampling_params(
    body: ConstraintFields,
    defaults: SamplingParams,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    **more: Any,  # Any: the parameters have several types
) -> SamplingParams:
    """Returns the model's `defaults` with the values of those fields that have the name of a parameter, with the constraints of
    the request, and with `more`, which are parameters that the API has under other names.

    Raises:
        InvalidRequestError: values are out of bounds, or contradict each other.
    """
    names = settings_of(SamplingParams).keys() & type(body).model_fields.keys() - ConstraintFields.model_fields.keys()
    given: dict[str, Any] = {name: value for name in names if (value := getattr(body, name)) is not None}
    given |= {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    return replace(defaults, **given, **more, **body.given_constraints())
