"""The fields of sampling have the bounds of `SamplingParams`."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from inflight.entrypoints.fields.sampling_fields import SamplingFields, StopList, StopStrings
from inflight.sampling_params import SamplingParams
from inflight.setting import settings_of


@pytest.mark.parametrize("name", SamplingFields.model_fields)
def test_bounds_are_those_of_the_engine(name: str) -> None:
    low, high = settings_of(SamplingParams)[name].bounds
    for bound, beyond in ((low, -1), (high, 1)):
        if bound is not None:
            with pytest.raises(ValidationError):
                SamplingFields.model_validate({name: bound + beyond})
    assert getattr(SamplingFields.model_validate({name: 1}), name) == 1


def test_empty_stop_strings_are_left_out() -> None:
    assert TypeAdapter(StopList).validate_python(["", "a", ""]) == ["a"]
    assert TypeAdapter(StopStrings).validate_python("") is None
    with pytest.raises(ValidationError):
        TypeAdapter(StopList).validate_python([5])
