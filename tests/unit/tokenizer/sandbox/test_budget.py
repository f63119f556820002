"""What a budget counts, and that nothing gives it back."""

from __future__ import annotations

import time

import pytest

from inflight.tokenizer.sandbox.budget import (
    IS_UNWANTED,
    MAX_DEPTH,
    MAX_ITEMS,
    MAX_TEXT,
    Counted,
    TemplateBudget,
    TemplateLimitError,
)


def test_steps_end_exactly_and_stay_at_their_end() -> None:
    budget = TemplateBudget(200_000)
    for _ in range(20_000):
        budget.spend(10)
    for _ in range(2):
        with pytest.raises(TemplateLimitError):
            budget.spend(1)


def test_characters_are_counted_together() -> None:
    budget = TemplateBudget(max_characters=100)
    budget.make(60)
    budget.make(40)
    with pytest.raises(TemplateLimitError):
        budget.make(1)
    with pytest.raises(TemplateLimitError):
        TemplateBudget().make(MAX_TEXT + 1)


def test_processor_time_is_the_last_limit() -> None:
    budget = TemplateBudget(seconds=-1.0)
    for _ in range(2):
        with pytest.raises(TemplateLimitError):
            budget.spend(1)


def test_a_rendering_ends_when_nobody_waits_for_it() -> None:
    is_unwanted = False
    token = IS_UNWANTED.set(lambda: is_unwanted)
    budget = TemplateBudget()
    IS_UNWANTED.reset(token)
    budget.spend(1000)
    is_unwanted = True
    for _ in range(2):
        with pytest.raises(TemplateLimitError):
            budget.spend(2**17)


def test_a_long_rendering_in_a_thread_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the event loop, which can take Python's lock from it only every 5 ms. A short rendering is not slowed down, and
    neither is one without an event loop."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    clock = 0.0
    monkeypatch.setattr(time, "thread_time", lambda: clock)
    TemplateBudget().spend(2**24)
    token = IS_UNWANTED.set(lambda: False)
    budget = TemplateBudget()
    IS_UNWANTED.reset(token)
    for _ in range(10):
        clock += 0.004
        budget.spend(2**17)
    assert pauses == []
    for _ in range(10):
        clock += 0.004
        budget.spend(2**17)
    assert len(pauses) >= 7 and min(pauses) == pytest.approx(0.012) and max(pauses) == pytest.approx(0.012)


def test_a_longer_chat_may_take_more() -> None:
    short, long = TemplateBudget.of_chat(1, 10), TemplateBudget.of_chat(1000, 10_000)
    short.spend(TemplateBudget.STEPS)
    long.spend(3 * TemplateBudget.STEPS)
    with pytest.raises(TemplateLimitError):
        short.spend(1000)


def test_what_is_in_a_value_twice_counts_twice_and_is_looked_at_once() -> None:
    budget = TemplateBudget(1000)
    value: list[object] = ["ab"]
    for _ in range(16):
        value = [value, value]
    items, characters, depth = budget.size(value)
    assert items >= 2**16
    assert characters >= 2 * 2**16
    assert depth == 17
    for _ in range(30):
        value = [value, value]
    with pytest.raises(TemplateLimitError):
        budget.size(value)


def test_depth_is_bounded() -> None:
    value: object = ()
    for _ in range(MAX_DEPTH + 1):
        value = (value,)
    with pytest.raises(TemplateLimitError):
        TemplateBudget().size(value)


@pytest.mark.parametrize(
    ("value", "items"),
    [
        ({"a": [1, "b"]}, 5),
        ({"a": 1}.values(), 2),
        ({"a": 1}.items(), 4),
        (range(500), 500),
        (object(), 1),
        ("text", 1),
        ({"k"}, 2),
    ],
)
def test_sizes(value: object, items: int) -> None:
    assert TemplateBudget().size(value)[0] == items


def test_iterators_are_read_to_a_bound() -> None:
    budget = TemplateBudget(2**20)
    assert budget.list(iter("abc")) == ["a", "b", "c"]
    with pytest.raises(TemplateLimitError):
        budget.list(iter(range(10**9)))
    with pytest.raises(TemplateLimitError):
        budget.list("x" * (MAX_ITEMS + 1))


def test_iterators_of_iterators_are_bounded() -> None:
    budget = TemplateBudget()
    counted = Counted(budget, iter("a"))
    for _ in range(MAX_DEPTH):
        counted = Counted(budget, counted, counted)
    with pytest.raises(TemplateLimitError):
        Counted(budget, counted, counted)
