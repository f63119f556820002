"""The ring of step events."""

from __future__ import annotations

import threading

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


def test_spans_that_have_not_ended_are_known_to_other_threads() -> None:
    timeline, seen = Timeline(), list[list[str]]()

    def look() -> None:
        thread = threading.Thread(
            target=lambda: seen.append([text.rpartition(" for ")[0] for text in timeline.under_way()])
        )
        thread.start()
        thread.join()

    with timeline.span(7, "forward"):
        with timeline.span(7, "receive"):
            look()
        look()
    look()
    assert seen == [["receive of step 7"], ["forward of step 7"], []]
    with timeline.span(8, "sample"):
        assert timeline.under_way() == ["sample of step 8 for 0.0 s"]


def test_events_are_in_the_order_of_their_starts_and_keep_their_details() -> None:
    timeline = Timeline()
    timeline.record(2, "commit", 50, 60, {"predicted_ms": 1.5})
    timeline.record(1, "plan", 10, 99)
    assert [(event.step_id, event.start_ns, event.details) for event in timeline.events()] == [
        (1, 10, None),
        (2, 50, {"predicted_ms": 1.5}),
    ]
    with timeline.span(3, "sample"), timeline.span(4, "drain"):
        pass
    assert [(event.step_id, event.phase) for event in timeline.events()][2:] == [(3, "sample"), (4, "drain")]
    assert timeline.under_way() == []
