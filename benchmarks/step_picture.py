"""A picture of a few steps: a row for each phase of the engine and of every rank, a colour for each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from inflight.timeline import Event

LANES = ("plan", "wait", "commit", "prepare", "receive", "forward", "send", "sample", "drain")  # top to bottom
WAITING = ("wait", "receive")  # drawn pale
LANE_INCHES = 0.19
Events = Mapping[str, Sequence[Event]]  # by process


def window(events: Events, num_steps: int) -> tuple[range, int, int]:
    """`num_steps` steps in the middle, and the nanoseconds from the first one's first forward to the last one's last drain."""
    steps = sorted({event.step_id for found in events.values() for event in found})
    first = steps[len(steps) // 2]
    chosen = range(first, first + num_steps)
    shown = [event for found in events.values() for event in found if event.step_id in chosen]
    start = min(event.start_ns for event in shown if event.phase == "forward")
    return chosen, start, max(event.end_ns for event in shown if event.phase == "forward")


def draw_steps(panels: Mapping[str, Events], num_steps: int, path: Path) -> None:
    """One panel for each title. Everything that happens in the window is drawn, the steps around the chosen ones included."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    rows = {title: [(process, lane) for process in events for lane in LANES] for title, events in panels.items()}
    for title, events in panels.items():
        used = {(process, event.phase) for process, found in events.items() for event in found}
        rows[title] = [row for row in rows[title] if row in used]
    heights = [len(found) * LANE_INCHES + 0.7 for found in rows.values()]
    figure = Figure(figsize=(12, sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    colours = colormaps["tab10"]
    for axis, (title, events) in zip(axes, panels.items(), strict=True):
        _, start_ns, end_ns = window(events, num_steps)
        seconds = (end_ns - start_ns) / 1e9
        for row, (process, lane) in enumerate(rows[title]):
            for event in events[process]:
                if event.phase != lane or event.end_ns < start_ns or event.start_ns > end_ns:
                    continue
                left, width = (event.start_ns - start_ns) / 1e6, event.microseconds / 1e3
                waits = lane in WAITING
                alpha = 0.25 if waits else 0.9
                axis.barh(row, max(width, seconds), left=left, height=0.86, color=colours(event.step_id % 10), alpha=alpha)
                middle = left + width / 2
                if width > 18 * seconds and 0 < middle < 1e3 * seconds:
                    colour = "black" if waits else "white"
                    axis.text(middle, row, str(event.step_id), ha="center", va="center", fontsize=7, color=colour)
            if row and rows[title][row - 1][0] != process:
                axis.axhline(row - 0.5, color="black", linewidth=0.8)
        labels = [f"{process}   {lane}" if _is_first(rows[title], row) else lane for row, (process, lane) in enumerate(rows[title])]
        axis.set_yticks(range(len(labels)), labels, fontsize=8)
        axis.set_xlim(0, 1e3 * seconds)
        axis.set_ylim(len(labels) - 0.5, -0.5)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("ms; the number is that of the step; pale: waits", fontsize=8)
        axis.grid(axis="x", linewidth=0.3)
    figure.savefig(path, dpi=90)


def _is_first(rows: Sequence[tuple[str, str]], row: int) -> bool:
    """Of its process."""
    return row == 0 or rows[row - 1][0] != rows[row][0]
