"""Figures from the timelines: how long the device of a rank stood idle, and how much of the host's work it hid.

Time is cut at the ends of steps. A *step* of a rank is busy in its `forward` and `sample`; its *period* is the time from the
end of the step before it to its own end, so periods neither overlap nor leave anything out:

    device  | forward 7 | sample 7 |      | forward 8 ......... |    | sample 8 | ...
                                   | idle |                     |idle|
                                   | <------- period of step 8 -----------> |

Idle is all of a period that is not busy: the gap in front of the forward, in which a rank may also wait for another one
(`receive`), and the gap in front of the sampling where the step's masks are late. A period in which the engine had no request
for any time (`idle` of its timeline) is left out, as is the first step of the timeline, which nothing comes before.

Arithmetic is exact, in nanoseconds, on clocks that must be one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from inflight.timeline import Event

DEVICE_PHASES = frozenset({"forward", "sample"})
HOST_PHASES = frozenset(
    {"plan", "mask", "commit", "prepare", "drain"}
)  # work, where the others wait or are the device's
ENGINE = "engine"  # the key of the engine's own timeline

Interval = tuple[int, int]  # [start, end) in nanoseconds


@dataclass(frozen=True, slots=True)
class Spread:
    """Microseconds. A share of the values, a half or 99 %, does not exceed `p50` or `p99`; both are values that occurred."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """One rank's device, and the host work around it.

    Attributes:
        num_periods: how many periods all this is about; the share and the spreads of none are None.
        period: from the end of a step to the end of the next.
        idle: of each period, the time in which the device did nothing.
        idle_share: of all periods, the same.
        hidden_share: of the host's work in these periods, `HOST_PHASES` of the engine and of this rank, the share of its
            time in which the device was busy. None if there was no such work.
        phases: of each phase of the rank, the time it took, over the events that ended in these periods.
    """

    num_periods: int
    period: Spread | None
    idle: Spread | None
    idle_share: float | None
    hidden_share: float | None
    phases: dict[str, Spread]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Of the engine, the time that each phase took; of every rank, its figures, under the names of `timeline_events`."""

    engine_phases: dict[str, Spread]
    ranks: dict[str, RankFigures]


def step_figures(events: Mapping[str, Sequence[Event]]) -> StepFigures:
    """`events`: of "engine" and any number of ranks, as `LLMEngine.timeline_events` gives them."""
    engine = events[ENGINE]
    return StepFigures(
        engine_phases=_phases(event for event in engine if event.phase != "idle"),
        ranks={process: rank_figures(engine, rank) for process, rank in events.items() if process != ENGINE},
    )


def rank_figures(engine: Sequence[Event], rank: Sequence[Event]) -> RankFigures:
    """The figures of one rank. A step whose beginning the ring has dropped is none: it lacks a phase."""
    periods = _periods(rank, TimeSet((event.start_ns, event.end_ns) for event in engine if event.phase == "idle"))
    counted = TimeSet(periods)
    busy = TimeSet((event.start_ns, event.end_ns) for event in rank if event.phase in DEVICE_PHASES)
    idle = [end - start - busy.within(start, end) for start, end in periods]
    hidden = TimeSet(
        (max(start, busy_start), min(end, busy_end))
        for start, end in periods
        for busy_start, busy_end in busy.overlapping(start, end)
    )
    host = [event for event in (*engine, *rank) if event.phase in HOST_PHASES]
    host_ns = sum(counted.within(event.start_ns, event.end_ns) for event in host)
    hidden_ns = sum(hidden.within(event.start_ns, event.end_ns) for event in host)
    return RankFigures(
        num_periods=len(periods),
        period=_spread([end - start for start, end in periods]),
        idle=_spread(idle),
        idle_share=sum(idle) / counted.length if counted.length else None,
        hidden_share=hidden_ns / host_ns if host_ns else None,
        phases=_phases(event for event in rank if counted.within(event.end_ns - 1, event.end_ns)),
    )


class TimeSet:
    """A set of times: the union of intervals, those that are empty left out."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(intervals):
            if start >= end:
                continue
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)
        lengths = [end - start for start, end in zip(self._starts, self._ends, strict=True)]
        self._before = list(accumulate(lengths, initial=0))  # [i]: the length of the first i

    @property
    def length(self) -> int:
        return self._before[-1]

    def within(self, start: int, end: int) -> int:
        """The length of what lies in [start, end)."""
        return self._length_until(end) - self._length_until(start)

    def overlapping(self, start: int, end: int) -> Iterator[Interval]:
        """Its intervals that have a time in [start, end), uncut."""
        for i in range(bisect_right(self._ends, start), len(self._starts)):
            if self._starts[i] >= end:
                return
            yield self._starts[i], self._ends[i]

    def _length_until(self, time: int) -> int:
        i = bisect_right(self._starts, time)
        return self._before[i] - max(0, self._ends[i - 1] - time) if i else 0


def _periods(rank: Sequence[Event], without_requests: TimeSet) -> list[Interval]:
    """Between the ends of steps that follow one another. Some may be empty, where two steps end at once."""
    phases: dict[int, dict[str, int]] = {}  # step id -> phase -> its end
    for event in rank:
        phases.setdefault(event.step_id, {})[event.phase] = event.end_ns
    ends = sorted(
        max(end for phase, end in step.items() if phase in DEVICE_PHASES)
        for step in phases.values()
        if {"prepare", "forward"} <= set(step)
    )
    return [(start, end) for start, end in pairwise(ends) if not without_requests.within(start, end)]


def _phases(events: Iterable[Event]) -> dict[str, Spread]:
    times: dict[str, list[int]] = {}
    for event in events:
        times.setdefault(event.phase, []).append(event.end_ns - event.start_ns)
    return {phase: spread for phase, values in times.items() if (spread := _spread(values))}


def _spread(nanoseconds: Sequence[int]) -> Spread | None:
    if not nanoseconds:
        return None
    p50, p99 = np.percentile(nanoseconds, (50, 99), method="inverted_cdf")
    return Spread(float(p50) / 1e3, float(p99) / 1e3)
