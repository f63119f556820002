"""A few steps of a timeline as a picture, and as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.overlap.pipeline_overlap import busy_milliseconds
from benchmarks.overlap.step_picture import draw_steps, lanes, window
from benchmarks.overlap.step_text import text_steps
from inflight.timeline import Event


def test_a_picture_of_steps(tmp_path: Path) -> None:
    milliseconds = 1_000_000
    ranks = [
        [Event(i, phase, start * milliseconds, end * milliseconds)]
        for i in range(10)
        for phase, start, end in (("receive", 20 * i, 20 * i + 1), ("forward", 20 * i + 1, 20 * i + 20))
    ]
    rank = [event for events in ranks for event in events]
    events = {"engine": [Event(i, "plan", 0, 1) for i in range(10)], "rank 0": rank}
    assert window(events, 4) == (61 * milliseconds, 140 * milliseconds)  # steps 3 to 6
    assert lanes(events) == [("engine", "plan"), ("rank 0", "receive"), ("rank 0", "forward")]
    assert busy_milliseconds(rank, 10) == pytest.approx(19.0)
    draw_steps({"one": events, "two": events}, 4, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_steps_as_text() -> None:
    engine = [Event(7, "plan", 0, 10), Event(8, "plan", 500, 510), Event(7, "wait", 10, 990)]
    rank = [Event(7, "forward", 100, 600), Event(18, "forward", 650, 2000)]
    assert text_steps({"engine": engine, "rank 0": rank}, 0, 1000, width=10).splitlines() == [
        "engine plan    |7    8    |",
        "       wait    |7........7|",
        "rank 0 forward | 777778888|",
        "                0   0.0 ms",
    ]
