"""`StepClock`: idle times between steps, and the share of hidden work."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.engine.core import step_clock
from inflight.engine.core.step_clock import StepClock

Step = Future[Any]


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock shows: the last element."""
    times = [0.0]
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter_ns=lambda: int(times[-1] * 1e9)))
    return times


def test_idle_times_and_hidden_work(seconds: list[float]) -> None:
    clock, first, second, third = StepClock(), Step(), Step(), Step()
    clock.submitted(first, after_idleness=True)
    clock.worked(0, 3)
    seconds.append(1.0)
    first.set_result(None)
    seconds.append(1.5)
    clock.worked(0, 1)
    clock.submitted(second, after_idleness=False)  # half a second after the first one has ended
    clock.submitted(third, after_idleness=False)  # while the second one runs
    assert clock.take() == ((0.5, 0.0), 0.75)
    assert clock.take() == ((), None)
    third.set_result(None)
    seconds.append(60.0)
    clock.submitted(Step(), after_idleness=True)  # there was nothing to do
    assert clock.take() == ((), None)


def test_an_end_that_is_not_noted_yet_is_not_the_end_of_an_earlier_step(seconds: list[float]) -> None:
    """A future is done before its callbacks run."""
    clock, first, second = StepClock(), Step(), Step()
    clock.submitted(first, after_idleness=True)
    first.set_result(None)
    has_begun, may_end = threading.Event(), threading.Event()
    second.add_done_callback(lambda _: (has_begun.set(), may_end.wait(300)))
    clock.submitted(second, after_idleness=False)
    seconds.append(5.0)
    with ThreadPoolExecutor() as pool:
        done = pool.submit(second.set_result, None)
        assert has_begun.wait(300)
        clock.submitted(Step(), after_idleness=False)
        may_end.set()
        done.result(300)
    assert clock.take() == ((0.0, 0.0), None)
