"""Successive pieces of one kind are joined, and the order of the kinds stays."""

from __future__ import annotations

import pytest

from inflight.interface.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
    join_deltas,
)

A, B, THOUGHT = ContentDelta("a"), ContentDelta("b"), ReasoningDelta("t")
FIRST, SECOND = ToolCallStart(0, "id0", "f"), ToolCallStart(1, "id1", "f")


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], []),
        ([A], [A]),
        ([FIRST], [FIRST]),
        ([A, B], [ContentDelta("ab")]),
        ([A, B, A], [ContentDelta("aba")]),
        ([A, THOUGHT, THOUGHT, B], [A, ReasoningDelta("tt"), B]),
        ([FIRST, SECOND], [FIRST, SECOND]),
        (
            [A, FIRST, ToolArgumentsDelta(0, "{"), ToolArgumentsDelta(0, "}"), ToolArgumentsDelta(1, "[]")],
            [A, FIRST, ToolArgumentsDelta(0, "{}"), ToolArgumentsDelta(1, "[]")],
        ),
    ],
)
def test_successive_deltas_of_one_kind_are_joined(events: list[Event], expected: list[Event]) -> None:
    before = list(events)
    assert join_deltas(events) == expected
    assert events == before
