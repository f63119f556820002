"""From a timeline to the time of each phase."""

from __future__ import annotations

from benchmarks.overhead.control_plane import by_phase
from inflight.timeline import Event


def test_phases_are_summed_per_step() -> None:
    def event(step_id: int, phase: str, milliseconds: int) -> Event:
        return Event(step_id, phase, 0, milliseconds * 1_000_000)

    whole = [event(3, phase, 1 + i) for i, phase in enumerate(("plan", "prepare", "forward", "sample", "commit"))]
    times = by_phase([*whole, event(4, "plan", 100)])  # step 4 is not over
    assert times["plan+prepare"] == [3.0]
    assert (times["plan"], times["forward"], times["commit"]) == ([1.0], [3.0], [5.0])
