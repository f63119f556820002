"""A picture of a few steps: a row for each phase of the engine and of every rank, a colour for each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inflight.timeline import Event

LANES = ("plan", "wait", "mask", "commit", "prepare", "receive", "forward", "send", "sample", "drain")  # top to bottom
WAITING = ("wait", "receive")  # drawn pale
LANE_INCHES = 0.19
Events = Mapping[str, Sequence[Event]]  # by process


def window(events: Events, num_steps: int) -> tuple[int, int]:
    """Nanoseconds from the first forward of `num_steps` steps in the middle to the end of their last."""
    steps = sorted({event.step_id for found in events.values() for event in found})
    first = steps[max(0, (len(steps) - num_steps) // 2)]
    forwards = [event for found in events.values() for event in found if event.phase == "forward"]
    shown = [event for event in forwards if first <= event.step_id < first + num_steps]
    return min(event.start_ns for event in shown), max(event.end_ns for event in shown)


def draw_steps(panels: Mapping[str, Events], num_steps: int, path: Path) -> None:
    """One panel for each title. Everything that happens in the window is drawn, the steps around the chosen ones included."""
    from matplotlib.figure import Figure

    heights = [len(lanes(events)) * LANE_INCHES + 0.7 for events in panels.values()]
    figure = Figure(figsize=(12, sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (title, events) in zip(axes, panels.items(), strict=True):
        axis.set_title(title, fontsize=10, loc="left")
        _draw_panel(axis, events, *window(events, num_steps))
    figure.savefig(path, dpi=90)


def lanes(events: Events) -> list[tuple[str, str]]:
    """(process, phase) of all rows, top to bottom."""
    used = {(process, event.phase) for process, found in events.items() for event in found}
    return [(process, lane) for process in events for lane in LANES if (process, lane) in used]


def _draw_panel(axis: Any, events: Events, start_ns: int, end_ns: int) -> None:  # Any: matplotlib's Axes
    from matplotlib import colormaps

    milliseconds = (end_ns - start_ns) / 1e6
    rows, labels = lanes(events), []
    colours = colormaps["tab10"]
    for row, (process, lane) in enumerate(rows):
        for event in events[process]:
            if event.phase != lane or event.end_ns < start_ns or event.start_ns > end_ns:
                continue
            left, width, waits = (event.start_ns - start_ns) / 1e6, event.microseconds / 1e3, lane in WAITING
            bar = {"color": colours(event.step_id % 10), "alpha": 0.25 if waits else 0.9}
            axis.barh(row, max(width, milliseconds / 1000), left=left, height=0.86, **bar)
            middle = left + width / 2
            if width > milliseconds / 50 and milliseconds / 100 < middle < milliseconds * 0.99:
                colour = "black" if waits else "white"
                axis.text(middle, row, str(event.step_id), ha="center", va="center", fontsize=7, color=colour)
        is_first = row == 0 or rows[row - 1][0] != process
        labels.append(f"{process}   {lane}" if is_first else lane)
        if row and is_first:
            axis.axhline(row - 0.5, color="black", linewidth=0.8)
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.set_xlim(0, milliseconds)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.set_xlabel("ms; a bar's number is that of its step; pale: waits", fontsize=8)
    axis.grid(axis="x", linewidth=0.3)
