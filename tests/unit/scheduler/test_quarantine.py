"""Which request runs alone, and when it is the cause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from inflight.scheduler.quarantine import MAX_FAULTS, Quarantine


def request(order: int, **changes: Any) -> Any:
    fields = {"num_faults": 0, "num_tokens": 5, "num_tokens_at_fault": 5, "has_grammar": False, "defers_grammar": False}
    return SimpleNamespace(order=order, **(fields | changes))


def test_the_oldest_quarantined_request_runs_alone_and_progress_clears_it() -> None:
    quarantine, (a, b, c) = Quarantine(), (request(0), request(1), request(2))
    for number in range(MAX_FAULTS):
        assert quarantine.alone is None
        assert quarantine.record_failed_step([b, a] if number else [b, a, c]) is None
    assert quarantine.alone is a
    a.num_tokens += 1
    quarantine.record_progress(a)  # its prompt works; the first decode may still fail
    assert quarantine.alone is a
    a.num_tokens += 1
    quarantine.record_progress(a)
    assert quarantine.alone is b and a.num_faults == 0
    assert quarantine.record_failed_step([b]) is b
    quarantine.clear(b)
    assert quarantine.alone is None


def test_a_request_that_was_alone_by_chance_is_not_the_cause() -> None:
    quarantine, a = Quarantine(), request(0)
    assert [quarantine.record_failed_step([a]) for _ in range(MAX_FAULTS)] == [None] * MAX_FAULTS
    assert quarantine.record_failed_step([a]) is a


def test_one_token_after_each_fault_is_no_progress() -> None:
    """The prompt of such a request can be computed after a fault, but each decode fails."""
    quarantine, a = Quarantine(), request(0)
    for _ in range(MAX_FAULTS):
        assert quarantine.record_failed_step([a]) is None
        a.num_tokens += 1
        quarantine.record_progress(a)
    assert quarantine.alone is a


def test_a_quarantined_request_waits_for_the_steps_of_others() -> None:
    in_flight: list[Any] = []
    quarantine, a = Quarantine(in_flight), request(0, num_faults=MAX_FAULTS)
    in_flight.append(("a plan", [request(1)]))
    assert quarantine.add(a) and quarantine.alone is a and quarantine.lone is None
    in_flight[0] = ("a plan", [a])
    assert quarantine.lone is a


def test_only_the_grammar_of_the_quarantined_request_that_may_run_is_compiled() -> None:
    quarantine = Quarantine()
    a, b = (request(order, num_faults=MAX_FAULTS, has_grammar=True) for order in range(2))
    c = request(2, has_grammar=True)
    assert [quarantine.add(each) for each in (a, b, c)] == [True, True, False]
    assert quarantine.take_deferred() == [a]
    assert quarantine.take_deferred() == []
    quarantine.clear(b)  # it was aborted
    quarantine.clear(a)
    assert quarantine.take_deferred() == [c]
    d = request(3, has_grammar=True)
    quarantine.add(d)
    assert not d.defers_grammar


def test_a_quarantined_request_that_shares_a_failed_step_is_not_yet_the_cause() -> None:
    """The other requests of the step may be the cause."""
    quarantine, a, b = Quarantine(), request(0, num_faults=MAX_FAULTS), request(1)
    quarantine.add(a)
    assert quarantine.record_failed_step([a, b]) is None
    assert (a.num_faults, b.num_faults) == (MAX_FAULTS + 1, 1)
    assert quarantine.record_failed_step([b]) is None
    assert quarantine.record_failed_step([a]) is a


def test_the_engine_cores_that_were_lost_count_as_faults() -> None:
    quarantine = Quarantine()
    assert not quarantine.add(request(0, num_faults=MAX_FAULTS - 1))
    assert quarantine.alone is None
    assert quarantine.add(request(1, num_faults=MAX_FAULTS))
    assert quarantine.alone is not None and quarantine.alone.order == 1
