"""Parameters of other libraries: what is told, and that none of them is a parameter of ours."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from inflight import InflightError, InvalidRequestError, SamplingParams, StructuredOutputsParams
from inflight.foreign_parameters import FOREIGN_CONSTRAINTS, FOREIGN_SAMPLING

CASES = [(SamplingParams, {}, FOREIGN_SAMPLING), (StructuredOutputsParams, {"regex": "a"}, FOREIGN_CONSTRAINTS)]


@pytest.mark.parametrize(("kind", "needed", "foreign"), CASES)
def test_a_foreign_parameter_says_what_to_give(kind: Any, needed: dict[str, Any], foreign: dict[str, str]) -> None:
    ours = {each.name for each in fields(kind)}
    assert not ours & foreign.keys()
    for name, advice in foreign.items():
        for error in (InflightError, InvalidRequestError, TypeError, ValueError):
            with pytest.raises(error) as found:
                kind(**needed, **{name: 5})
            assert name in str(found.value) and advice in str(found.value)
        assert kind(**needed, **{name: None}) == kind(**needed)


@pytest.mark.parametrize(("kind", "needed", "foreign"), CASES)
def test_a_misspelt_parameter_proposes_ours(kind: Any, needed: dict[str, Any], foreign: dict[str, str]) -> None:
    for each in fields(kind):
        misspelt = f"{each.name}x"
        with pytest.raises(TypeError, match=f"did you mean '{each.name}'" if len(each.name) > 2 else misspelt):
            kind(**needed, **{misspelt: 1})
    with pytest.raises(TypeError, match="takes its values by name"):
        kind(0.7)
