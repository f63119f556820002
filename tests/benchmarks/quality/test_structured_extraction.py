"""A right answer satisfies the constraints that are made for it, and no other spacing does."""

from __future__ import annotations

import json
import re

import jsonschema

from benchmarks.quality.structured_extraction import regex_of, schema_of
from scripts.demo.evaluate import held_out_samples


def test_a_right_extraction_satisfies_its_constraints() -> None:
    for sample in held_out_samples("extraction", 50):
        schema, answer = schema_of(sample), sample.answer["content"]
        jsonschema.validate(json.loads(answer), schema)
        assert re.fullmatch(regex_of(schema), answer, re.ASCII)
        assert not re.fullmatch(regex_of(schema), answer.replace(": ", ":"), re.ASCII)
