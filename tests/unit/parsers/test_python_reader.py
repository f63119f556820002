"""Calls that are written as in Python: every call is read, and a damaged call never becomes another valid call."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from inflight.interface.events import ToolArgumentsDelta, ToolCallStart
from inflight.parsers.selector import create_output_parser
from tests.unit.parsers.family_cases import FAMILIES, PYTHON
from tests.unit.parsers.parser_cases import parse
from tests.unit.parsers.python_calls import damaged, random_arguments, written

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {key: {} for key in "snob"}}}}]


def arguments_of(tool: str, text: str, tools: list[dict[str, Any]] = TOOLS) -> list[Any] | None:
    """The arguments of the calls; None if one of them is no JSON."""
    events = parse(create_output_parser(tool, None, tools=tools), [text], is_cut=False)
    texts = [event.text for event in events if isinstance(event, ToolArgumentsDelta)]
    assert len(texts) == sum(isinstance(event, ToolCallStart) for event in events)
    try:
        return [json.loads(each) for each in texts]
    except ValueError:
        return None


@pytest.mark.parametrize("tool", PYTHON)
def test_a_damaged_call_never_becomes_another_call(tool: str) -> None:
    begin, end = PYTHON[tool]
    num: Counter[str] = Counter()
    for seed in range(1000):
        rng = random.Random(seed)
        arguments = random_arguments(rng)
        pieces = written(rng, "f", arguments)
        whole = "".join(text for text, _ in pieces)
        assert arguments_of(tool, f"{begin}{whole}{end}") == [arguments], whole
        kind, text = damaged(rng, pieces)
        found = arguments_of(tool, f"{begin}{text}{end}")
        assert found in (None, [arguments]), (kind, whole, text)
        num[kind] += found is not None
    assert all(num[kind] > 20 for kind in ("dropped", "doubled", "moved", "comment", "line break"))


@pytest.mark.parametrize("tool", PYTHON)
def test_a_call_that_breaks_off_is_no_other_call(tool: str) -> None:
    """If the arguments are JSON, they are the first ones of the whole call; a number or a string may have lost its end."""
    for case in (case for case in FAMILIES if case.tool == tool and '"name"' not in case.text):
        whole = arguments_of(tool, case.text)
        for end in range(len(case.text) if whole else 0):
            for found, wanted in zip(arguments_of(tool, case.text[:end]) or (), whole or (), strict=False):
                cut = {key for key in found if found[key] != wanted.get(key)}
                numbers = {key for key in cut if isinstance(found[key], float | int)}
                assert all(str(wanted[key]).startswith(found[key]) for key in cut - numbers), case.text[:end]
