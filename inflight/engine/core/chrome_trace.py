"""`chrome_trace`: timelines as a file for a viewer."""

from collections.abc import Mapping, Sequence
from typing import Any

from inflight.timeline import Event


def chrome_trace(events_by_process: Mapping[str, Sequence[Event]]) -> dict[str, Any]:  # Any: JSON
    """Returns the events in Chrome's trace format, for chrome://tracing and Perfetto.

    Each key of the mapping becomes a process, in the order of the mapping. Each phase of a process becomes a lane, because
    events of one phase never overlap. Times are microseconds since the first event. All processes must share one clock."""
    entries: list[dict[str, Any]] = []
    start_ns = min((event.start_ns for events in events_by_process.values() for event in events), default=0)
    for pid, (process, events) in enumerate(events_by_process.items()):
        entries.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": process}})
        entries.append({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}})
        lanes = {phase: tid for tid, phase in enumerate(dict.fromkeys(event.phase for event in events))}
        for phase, tid in lanes.items():
            entries.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": phase}})
        for event in events:
            entries.append(
                {
                    "name": f"{event.phase} {event.step_id}",
                    "cat": event.phase,
                    "ph": "X",
                    "pid": pid,
                    "tid": lanes[event.phase],
                    "ts": (event.start_ns - start_ns) / 1e3,
                    "dur": event.microseconds,
                    "args": {"step": event.step_id, **(event.details or {})},
                }
            )
    return {"displayTimeUnit": "ms", "traceEvents": entries}
