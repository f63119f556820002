"""Figures of the timelines: exact by hand, and equal to a count of ticks for any timeline."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.engine.core.step_figures import (
    DEVICE_PHASES,
    HOST_PHASES,
    RankFigures,
    Spread,
    TimeSet,
    rank_figures,
    step_figures,
)
from inflight.timeline import Event

Interval = tuple[int, int]


def ticks(intervals: list[Interval]) -> set[int]:
    return {tick for start, end in intervals for tick in range(start, end)}


INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 15)).map(lambda i: (i[0], i[0] + i[1])), max_size=12)


@given(intervals=INTERVALS, start=st.integers(-5, 80), length=st.integers(0, 40))
def test_a_set_of_times_is_a_set_of_ticks(intervals: list[Interval], start: int, length: int) -> None:
    times, end = TimeSet(intervals), start + length
    assert times.length == len(ticks(intervals))
    assert times.within(start, end) == len(ticks(intervals) & set(range(start, end)))
    found = list(times.overlapping(start, end))
    assert all(ticks([interval]) & set(range(start, end)) for interval in found)
    assert ticks(found) & set(range(start, end)) == ticks(intervals) & set(range(start, end))


def nearest_rank(values: list[int]) -> Spread | None:
    """By the definition: a percentile is the smallest value that so large a share of all does not exceed."""
    ordered = sorted(values)
    at = [ordered[math.ceil(share * len(ordered) / 100) - 1] for share in (50, 99)] if ordered else []
    return Spread(at[0] / 1e3, at[1] / 1e3) if at else None


def by_ticks(engine: list[Event], rank: list[Event]) -> RankFigures:
    def times(events: list[Event], phases: frozenset[str]) -> set[int]:
        return ticks([(event.start_ns, event.end_ns) for event in events if event.phase in phases])

    whole = [
        step
        for step in {event.step_id for event in rank}
        if {"prepare", "forward"} <= {event.phase for event in rank if event.step_id == step}
    ]
    ends = sorted(
        max(event.end_ns for event in rank if event.step_id == step and event.phase in DEVICE_PHASES) for step in whole
    )
    idle_engine, busy = times(engine, frozenset({"idle"})), times(rank, DEVICE_PHASES)
    periods = [set(range(start, end)) for start, end in pairwise(ends)]
    periods = [period for period in periods if not period & idle_engine]
    counted = {tick for period in periods for tick in period}
    host = [event for event in engine + rank if event.phase in HOST_PHASES]
    worked = [tick for event in host for tick in range(event.start_ns, event.end_ns) if tick in counted]
    phases: dict[str, list[int]] = {}
    for event in rank:
        if event.end_ns - 1 in counted:
            phases.setdefault(event.phase, []).append(event.end_ns - event.start_ns)
    return RankFigures(
        num_periods=len(periods),
        period=nearest_rank([len(period) for period in periods]),
        idle=nearest_rank([len(period - busy) for period in periods]),
        idle_share=len(counted - busy) / len(counted) if counted else None,
        hidden_share=sum(tick in busy for tick in worked) / len(worked) if worked else None,
        phases={phase: spread for phase, values in phases.items() if (spread := nearest_rank(values))},
    )


@st.composite
def timelines(draw: st.DrawFn, phases: list[str]) -> list[Event]:
    """Any events: steps may lack phases, overlap, end at once, come in any order. A phase comes once in a step."""
    keys = draw(st.lists(st.tuples(st.integers(0, 7), st.sampled_from(phases)), unique=True, max_size=24))
    lengths = st.tuples(st.integers(0, 60), st.integers(0, 9))
    return [Event(step, phase, start, start + length) for step, phase in keys for start, length in [draw(lengths)]]


@given(
    engine=timelines(["plan", "mask", "wait", "commit", "idle"]),
    rank=timelines(["prepare", "receive", "forward", "forward", "sample", "drain", "prepare"]),
)
def test_figures_are_those_of_a_count_of_ticks(engine: list[Event], rank: list[Event]) -> None:
    assert rank_figures(engine, rank) == by_ticks(engine, rank)


def step(step_id: int, start: int, mask_wait: int = 0) -> list[Event]:
    """A device's step: 100 us of forward, 20 of sampling; prepared in the 30 before it, drained in the 10 after it."""
    forward_end = start + 100_000
    sample = forward_end + mask_wait
    return [
        Event(step_id, "prepare", start - 30_000, start),
        Event(step_id, "forward", start, forward_end),
        Event(step_id, "sample", sample, sample + 20_000),
        Event(step_id, "drain", sample + 20_000, sample + 30_000),
    ]


def test_a_synchronous_engine_hides_nothing() -> None:
    starts = [200_000 * i for i in range(1, 6)]
    engine = [
        event
        for i, start in enumerate(starts)
        for event in (
            Event(i, "plan", start - 60_000, start - 30_000),
            Event(i, "wait", start - 30_000, start + 130_000),
            Event(i, "commit", start + 130_000, start + 140_000),
        )
    ]
    rank = [event for i, start in enumerate(starts) for event in step(i, start)]
    figures = step_figures({"engine": engine, "rank 0": rank})
    found = figures.ranks["rank 0"]
    assert (found.num_periods, found.period, found.idle) == (4, Spread(200.0, 200.0), Spread(80.0, 80.0))
    assert (found.idle_share, found.hidden_share) == (pytest.approx(0.4), 0.0)
    assert found.phases["forward"] == Spread(100.0, 100.0)
    assert figures.engine_phases == {
        "plan": Spread(30.0, 30.0),
        "wait": Spread(160.0, 160.0),
        "commit": Spread(10.0, 10.0),
    }


def test_planning_ahead_hides_the_host_and_a_late_mask_is_idle_time() -> None:
    late = [0, 0, 50_000, 0]
    starts = [100_000, 220_000, 340_000, 510_000]
    rank = [event for i, start in enumerate(starts) for event in step(i, start, late[i])]
    engine = [Event(i, "plan", start - 70_000, start - 40_000) for i, start in enumerate(starts)]
    found = rank_figures(engine, rank)
    assert found.idle == Spread(0.0, 50.0)  # of three periods
    assert found.idle_share == pytest.approx(50 / (120 + 170 + 120))
    # counted from 220: plans and preparations of steps 2 and 3, drains of 0 to 2; idle from 440 to 490: plan 3, 10 of prepare 3
    assert found.hidden_share == pytest.approx(1 - 40 / (4 * 30 + 3 * 10))


def test_an_engine_without_requests_leaves_no_device_waiting() -> None:
    rank = [event for i, start in enumerate([100_000, 220_000, 9_000_000, 9_120_000]) for event in step(i, start)]
    idle = Event(2, "idle", 345_000, 8_900_000)
    found = rank_figures([idle], rank)
    assert (found.num_periods, found.idle_share) == (2, 0.0)
    assert rank_figures([], rank).num_periods == 3


@pytest.mark.parametrize("rank", [[], step(0, 100_000), [*step(0, 100_000), *step(1, 300_000)[1:]]])
def test_too_few_steps_give_no_figures(rank: list[Event]) -> None:
    found = rank_figures([Event(0, "plan", 0, 10)], rank)
    assert found == RankFigures(num_periods=0, period=None, idle=None, idle_share=None, hidden_share=None, phases={})
