"""Figures of steps: how long devices were idle, and which share of the host's work was *hidden* (done while a device computed).

`step_figures` computes exact figures from timelines (`Timeline`), which record when each phase of a step ran. A device is busy
in the phases `forward` and `sample` of a step. The *period* of a step is the time from the end of the previous step to the
step's own end. So periods do not overlap, and there is no time between them:

    device  | forward 7 | sample 7 |      | forward 8 ......... |    | sample 8 | ...
                                   | idle |                     |idle|
                                   | <------- period of step 8 -----------> |

In the rest of a period the device is idle. It is idle before the forward pass, where a rank may also wait for another rank
(`receive`), and before the sampling if the masks of the step are late. Two kinds of periods do not count: the first one of a
timeline, and those in which the engine had no request for some time (`idle` in its timeline). Times are integers, in
nanoseconds. All processes must have the same clock.

`StepClock` (step_clock.py) estimates idle times and the hidden share while the engine runs.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from inflight.timeline import Event

DEVICE_PHASES = frozenset({"forward", "sample"})
HOST_PHASES = frozenset({"plan", "mask", "commit", "prepare", "drain"})  # in the other phases the host waits
ENGINE = "engine"  # the key of the engine's own timeline

Interval = tuple[int, int]  # [start, end) in nanoseconds


@dataclass(frozen=True, slots=True)
class Spread:
    """The median and the 99th percentile of some measured times, in microseconds. They are not interpolated."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """How busy the device of a rank was, and how much of the host's work was hidden.

    Attributes:
        num_periods: how many periods the figures cover. If it is 0, `phases` is empty, and the other figures are None.
        period: the lengths of the periods.
        idle: for each period, the time in which the device was idle.
        idle_share: the share of all periods in which the device was idle.
        hidden_share: the share of the host's work in these periods (`HOST_PHASES` of the engine and of this rank) during which
            the device was busy. None if the host did no work.
        phases: for each phase of the rank, the lengths of its events that ended in these periods.
    """

    num_periods: int
    period: Spread | None
    idle: Spread | None
    idle_share: float | None
    hidden_share: float | None
    phases: dict[str, Spread]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """The times of each phase of the engine, and the figures of every rank. The keys are those of `timeline_events`."""

    engine_phases: dict[str, Spread]
    ranks: dict[str, RankFigures]


def step_figures(events: Mapping[str, Sequence[Event]]) -> StepFigures:
    """Compute the figures from the events that `LLMEngine.timeline_events` returned."""
    engine = events[ENGINE]
    return StepFigures(
        engine_phases=_phases(event for event in engine if event.phase != "idle"),
        ranks={process: rank_figures(engine, rank) for process, rank in events.items() if process != ENGINE},
    )


def rank_figures(engine: Sequence[Event], rank: Sequence[Event]) -> RankFigures:
    """Compute the figures of one rank. Steps whose first phases are no longer in the timeline are left out."""
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
    """The union of some intervals. Empty intervals are left out."""

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
        self._before = list(accumulate(lengths, initial=0))  # [i] is the total length of the first i intervals

    @property
    def length(self) -> int:
        return self._before[-1]

    def within(self, start: int, end: int) -> int:
        """Returns how much time of this set is in [start, end)."""
        return self._length_until(end) - self._length_until(start)

    def overlapping(self, start: int, end: int) -> Iterator[Interval]:
        """Yields the intervals that overlap [start, end), each in its full length."""
        for i in range(bisect_right(self._ends, start), len(self._starts)):
            if self._starts[i] >= end:
                return
            yield self._starts[i], self._ends[i]

    def _length_until(self, time: int) -> int:
        i = bisect_right(self._starts, time)
        return self._before[i] - max(0, self._ends[i - 1] - time) if i else 0


def _periods(rank: Sequence[Event], without_requests: TimeSet) -> list[Interval]:
    """Returns the times between the ends of successive steps. Those in which the engine had no request for some time are left
    out. If two steps end at the same time, a period is empty."""
    phases: dict[int, dict[str, int]] = {}  # step id -> phase -> end of the phase
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
