"""Which request runs alone, and when it is the cause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from inflight.scheduler.suspects import MAX_FAILED_STEPS, Suspects


def request(order: int) -> Any:
    return SimpleNamespace(order=order, num_failed_steps=0)


def test_the_oldest_suspect_runs_alone_and_a_token_clears_it() -> None:
    suspects, (a, b, c) = Suspects(), (request(0), request(1), request(2))
    for number in range(MAX_FAILED_STEPS):
        assert suspects.alone is None
        assert suspects.note_failed_step([b, a] if number else [b, a, c]) is None
    assert suspects.alone is a
    suspects.clear(a)
    assert suspects.alone is b and a.num_failed_steps == 0
    assert suspects.note_failed_step([b]) is b
    suspects.clear(b)
    assert suspects.alone is None


def test_a_request_that_was_alone_by_chance_is_not_the_cause() -> None:
    suspects, a = Suspects(), request(0)
    assert [suspects.note_failed_step([a]) for _ in range(MAX_FAILED_STEPS)] == [None] * MAX_FAILED_STEPS
    assert suspects.note_failed_step([a]) is a
