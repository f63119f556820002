"""The ring of step events."""

from __future__ import annotations

import json
import threading

import pytest

from inflight.engine.core.chrome_trace import chrome_trace
from inflight.timeline import Event, Timeline


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


def test_a_chrome_trace_has_a_process_for_each_key_and_a_lane_for_each_phase() -> None:
    events = {
        "engine": [
            Event(4, "plan", 5_000, 7_500),
            Event(4, "commit", 90_000, 91_000),
            Event(5, "plan", 92_000, 93_000),
        ],
        "rank 0": [Event(4, "forward", 8_000, 80_000)],
        "rank 1": [],
    }
    trace = json.loads(json.dumps(chrome_trace(events)))
    entries = trace["traceEvents"]
    names = {entry["pid"]: entry["args"]["name"] for entry in entries if entry["name"] == "process_name"}
    assert names == {0: "engine", 1: "rank 0", 2: "rank 1"}
    lanes = {(entry["pid"], entry["tid"]): entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
    assert lanes == {(0, 0): "plan", (0, 1): "commit", (1, 0): "forward"}
    spans = [entry for entry in entries if entry["ph"] == "X"]
    assert [(lanes[span["pid"], span["tid"]], span["args"]["step"]) for span in spans] == [
        ("plan", 4),
        ("commit", 4),
        ("plan", 5),
        ("forward", 4),
    ]
    assert [(span["ts"], span["dur"]) for span in spans] == [(0.0, 2.5), (85.0, 1.0), (87.0, 1.0), (3.0, 72.0)]


def test_a_chrome_trace_of_nothing() -> None:
    assert chrome_trace({})["traceEvents"] == []
