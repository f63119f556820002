"""Timelines in the format of chrome://tracing."""

from __future__ import annotations

import json

from inflight.engine.core.chrome_trace import chrome_trace
from inflight.timeline import Event


def test_two_processes() -> None:
    engine = [
        Event(3, "plan", 5_000, 7_500),
        Event(3, "commit", 9_000, 9_250, {"predicted_ms": 1.5}),
        Event(4, "plan", 9_500, 9_500),
    ]
    trace = chrome_trace({"engine": engine, "rank 0": [Event(3, "forward", 4_000, 8_000)]})
    json.dumps(trace)
    names = {"engine": 0, "rank 0": 1}
    lanes = [("plan", 0, 0), ("commit", 0, 1), ("forward", 1, 0)]
    found = trace["traceEvents"]
    assert trace["displayTimeUnit"] == "ms"
    assert [each for each in found if each["name"] == "process_name"] == [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}} for name, pid in names.items()
    ]
    assert [each for each in found if each["name"] == "process_sort_index"] == [
        {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}} for pid in (0, 1)
    ]
    assert [each for each in found if each["name"] == "thread_name"] == [
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}} for name, pid, tid in lanes
    ]
    assert [each for each in found if each["ph"] == "X"] == [
        {"name": name, "cat": name.split()[0], "ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        for name, pid, tid, ts, dur, args in (
            ("plan 3", 0, 0, 1.0, 2.5, {"step": 3}),
            ("commit 3", 0, 1, 5.0, 0.25, {"step": 3, "predicted_ms": 1.5}),
            ("plan 4", 0, 0, 5.5, 0.0, {"step": 4}),
            ("forward 3", 1, 0, 0.0, 4.0, {"step": 3}),
        )
    ]
    assert len(found) == 4 + 3 + 4


def test_nothing_recorded_yet() -> None:
    assert [each["args"] for each in chrome_trace({"engine": []})["traceEvents"]] == [
        {"name": "engine"},
        {"sort_index": 0},
    ]
    assert chrome_trace({}) == {"displayTimeUnit": "ms", "traceEvents": []}
