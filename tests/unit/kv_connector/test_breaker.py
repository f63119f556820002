"""`Breaker`: when it opens, for how long, and what late operations change."""

from __future__ import annotations

from inflight.kv_connector.breaker import Breaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def fail(breaker: Breaker, times: int = 1) -> list[bool]:
    changes = []
    for _ in range(times):
        ticket = breaker.enter()
        assert ticket is not None
        changes.append(breaker.leave(ticket, False))
    return changes


def test_three_failures_in_a_row_open_it() -> None:
    breaker = Breaker(Clock())
    assert fail(breaker, 2) == [False, False]
    ticket = breaker.enter()
    assert ticket is not None and not breaker.leave(ticket, True)
    assert fail(breaker, 3) == [False, False, True]
    assert breaker.enter() is None


def test_pauses_double_up_to_thirty_seconds_and_begin_anew_after_a_success() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    fail(breaker, 3)
    for pause in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        clock.now += pause - 0.001
        assert breaker.enter() is None
        clock.now += 0.001
        assert fail(breaker) == [False]
    clock.now += 30
    ticket = breaker.enter()
    assert ticket is not None and breaker.leave(ticket, True)
    assert fail(breaker, 3) == [False, False, True]
    clock.now += 1
    assert breaker.enter() is not None


def test_one_trial_at_a_time() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    fail(breaker, 3)
    clock.now += 1
    trial = breaker.enter()
    assert trial is not None and breaker.enter() is None
    clock.now += 1000
    assert breaker.enter() is None
    assert breaker.leave(trial, True)
    assert breaker.enter() is not None and breaker.enter() is not None


def test_operations_that_began_before_it_opened_change_nothing() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    late = [breaker.enter() for _ in range(3)]
    fail(breaker, 3)
    assert late[0] is not None and not breaker.leave(late[0], True)
    assert breaker.enter() is None
    clock.now += 1
    trial = breaker.enter()
    assert trial is not None
    assert late[1] is not None and not breaker.leave(late[1], False)  # no failed trial
    assert breaker.enter() is None
    assert breaker.leave(trial, True)
    assert late[2] is not None and not breaker.leave(late[2], False)
    assert fail(breaker, 3) == [False, False, True]
