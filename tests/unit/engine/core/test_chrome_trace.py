"""Timelines as Chrome's trace format."""

from __future__ import annotations

import json

from inflight.engine.core.chrome_trace import chrome_trace
from inflight.timeline import Event


def test_a_chrome_trace_has_a_process_for_each_key_and_a_lane_for_each_phase() -> None:
    events = {
        "engine": [
            Event(4, "plan", 5_000, 7_500),
            Event(4, "commit", 90_000, 91_000, {"predicted_ms": 0.5, "measured_ms": 0.75}),
            Event(5, "plan", 92_000, 93_000),
        ],
        "rank 0": [Event(4, "forward", 8_000, 80_000)],
        "rank 1": [],
    }
    trace = json.loads(json.dumps(chrome_trace(events)))
    entries = trace["traceEvents"]
    names = {entry["pid"]: entry["args"]["name"] for entry in entries if entry["name"] == "process_name"}
    assert names == {0: "engine", 1: "rank 0", 2: "rank 1"}
    order = {entry["pid"]: entry["args"]["sort_index"] for entry in entries if entry["name"] == "process_sort_index"}
    assert order == {0: 0, 1: 1, 2: 2}
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
    assert [span["name"] for span in spans] == ["plan 4", "commit 4", "plan 5", "forward 4"]
    assert [span["cat"] for span in spans] == ["plan", "commit", "plan", "forward"]
    assert spans[1]["args"] == {"step": 4, "predicted_ms": 0.5, "measured_ms": 0.75}


def test_a_chrome_trace_of_nothing() -> None:
    assert chrome_trace({})["traceEvents"] == []
