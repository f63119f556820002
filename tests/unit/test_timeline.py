"""The ring of step events."""

from __future__ import annotations

import pytest

from inflight.timeline import Timeline


def test_the_ring_keeps_the_last_events_in_order() -> None:
    timeline = Timeline(capacity=3)
    for i in range(5):
        timeline.record(i, "plan", 10 * i, 10 * i + 4)
    assert [event.step_id for event in timeline.events()] == [2, 3, 4]
    assert timeline.events()[0].microseconds == 0.004


def test_a_span_is_recorded_when_its_body_raises() -> None:
    timeline = Timeline()
    with pytest.raises(ValueError, match="inside"), timeline.span(7, "forward"):
        raise ValueError("inside")
    (event,) = timeline.events()
    assert (event.step_id, event.phase) == (7, "forward") and event.end_ns >= event.start_ns
