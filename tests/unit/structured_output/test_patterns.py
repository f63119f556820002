"""Patterns of clients: searched in linear time."""

from __future__ import annotations

import pytest

from inflight.structured_output.llguidance_backend import LLGuidanceBackend
from inflight.structured_output.patterns import pattern_search
from inflight.structured_output.spec import GrammarSpec


@pytest.mark.parametrize(
    ("pattern", "text", "is_found"),
    [
        ("b", "abc", True),
        ("^b", "abc", False),
        ("^(a+)+$", "a" * 1000, True),
        ("^(a+)+$", "a" * 1000 + "!", False),  # Python's `re` does not end here
        ("(", "(", False),
        ("(?=a)", "a", False),
        ("(a{1000}){1000}", "a", False),
    ],
)
def test_whether_a_pattern_matches(pattern: str, text: str, is_found: bool) -> None:
    assert pattern_search(pattern)(text) is is_found


def test_a_pattern_beside_properties_does_not_stop_the_process() -> None:
    schema = f'{{"type": "object", "properties": {{"{"a" * 40}!": {{}}}}, "patternProperties": {{"^(a+)+$": {{}}}}}}'
    assert LLGuidanceBackend.relax(GrammarSpec("json", schema))[1] == []
