"""`GrammarPace`: which requests are slow, which of them a plan leaves out, and when they fail."""

from __future__ import annotations

import time

import pytest

from inflight.structured_output.pace import (
    MAX_SLOW_TOKENS,
    MAX_TOKEN_SECONDS,
    MAX_TOTAL_SECONDS,
    REST,
    SLOW_SECONDS,
    GrammarPace,
)

SLOW = 2 * SLOW_SECONDS


class Clock:
    seconds = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.seconds)
    return clock


def test_slow_requests_rest_while_others_run(clock: Clock) -> None:
    pace = GrammarPace()
    pace.add("fast", SLOW_SECONDS)
    pace.add("slow", SLOW)
    assert list(pace.slow) == ["slow"]
    assert list(pace.late({"fast", "slow"})) == ["slow"]
    assert not pace.late({"slow"}), "it has the engine to itself"
    assert not pace.late({"fast"})
    clock.seconds = 0.99 * REST * SLOW
    assert list(pace.late({"fast", "slow"})) == ["slow"]
    clock.seconds = 1.01 * REST * SLOW
    assert not pace.late({"fast", "slow"})


def test_what_slow_requests_take_adds_up(clock: Clock) -> None:
    pace = GrammarPace()
    for request_id in ("a", "b", "c"):
        pace.add(request_id, SLOW)
    pace.spend("a", SLOW)
    clock.seconds = 3.99 * REST * SLOW
    assert sorted(pace.late({"a", "b", "c", "fast"})) == ["a", "b", "c"]
    clock.seconds = 4.01 * REST * SLOW
    assert not pace.late({"a", "b", "c", "fast"})


def test_a_plan_has_a_bounded_time_for_slow_requests_and_they_take_turns(clock: Clock) -> None:
    pace = GrammarPace()
    for request_id in "abcd":
        pace.add(request_id, 0.4 * MAX_TOKEN_SECONDS)
    assert list(pace.late(set("abcd"))) == ["c", "d"]
    for request_id in "ab":
        assert not pace.next_token(request_id)
    assert list(pace.late(set("abcd"))) == ["a", "b"]
    pace.spend("c", 2 * MAX_TOKEN_SECONDS)
    pace.next_token("c")
    pace.drop("d")
    clock.seconds = 1000.0
    assert list(pace.late(set("abcd"))) == ["c"]
    pace.drop("a")
    pace.drop("b")
    assert not pace.late({"c"}), "one in any case"


def test_a_request_is_slow_until_a_token_is_fast() -> None:
    pace = GrammarPace()
    pace.add("a", SLOW)
    assert not pace.next_token("a")
    pace.spend("a", SLOW)
    pace.spend("a", SLOW)
    assert not pace.next_token("a")
    assert "a" in pace.slow
    pace.spend("a", SLOW_SECONDS)
    assert not pace.next_token("a")
    assert not pace.slow


def test_a_request_fails_by_one_token_or_by_all() -> None:
    pace = GrammarPace()
    pace.add("a", SLOW)
    nearly = [2 * MAX_TOKEN_SECONDS] * (MAX_SLOW_TOKENS - 1)
    for seconds in (*nearly, SLOW, *nearly):
        pace.spend("a", seconds)
        assert not pace.next_token("a")
    pace.spend("a", 2 * MAX_TOKEN_SECONDS)
    assert pace.next_token("a")
    pace.add("b", SLOW)
    num_tokens = 0
    failed = False
    while not failed:
        pace.spend("b", MAX_TOKEN_SECONDS / 2)
        failed = pace.next_token("b")
        num_tokens += 1
    assert num_tokens == pytest.approx(2 * MAX_TOTAL_SECONDS / MAX_TOKEN_SECONDS, abs=2)


def test_engines_with_the_same_plans_have_no_pace() -> None:
    pace = GrammarPace(is_on=False)
    pace.add("a", 1000.0)
    assert not pace.slow
