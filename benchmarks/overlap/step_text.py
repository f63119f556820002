"""A few steps as text: a line for each phase of the engine and of every rank, a digit (the last of its id) for each step."""

from __future__ import annotations

from benchmarks.overlap.step_picture import WAITING, Events, lanes


def text_steps(events: Events, start_ns: int, end_ns: int, *, width: int = 96) -> str:
    """Each column is a slice of time; of several events in one the longest is shown, and a short one still fills a column.

    A phase that only waits is drawn with dots between its ends.
    """
    column_ns = (end_ns - start_ns) / width
    rows = lanes(events)
    label_width = max(len(f"{process} {lane}") for process, lane in rows)
    lines = []
    previous = ""
    for process, lane in rows:
        cells, taken = [" "] * width, [0.0] * width
        for event in events[process]:
            if event.phase != lane or event.end_ns < start_ns or event.start_ns >= end_ns:
                continue
            first = max(0, int((event.start_ns - start_ns) / column_ns))
            last = min(width - 1, int((event.end_ns - start_ns) / column_ns))
            for column in range(first, last + 1):
                left = start_ns + column * column_ns
                covered = min(event.end_ns, left + column_ns) - max(event.start_ns, left)
                if covered > taken[column]:
                    is_inner = lane in WAITING and first < column < last
                    cells[column], taken[column] = "." if is_inner else str(event.step_id % 10), covered
        name = f"{process if process != previous else ' ' * len(process)} {lane}"
        previous = process
        lines.append(f"{name:<{label_width}} |{''.join(cells)}|")
    milliseconds = (end_ns - start_ns) / 1e6
    return "\n".join([*lines, f"{'':<{label_width}}  0 {f'{milliseconds:.1f} ms':>{width - 2}}"])
