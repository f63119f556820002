"""`CompileQueue`: in which order clients get their grammars, and who is refused."""

from __future__ import annotations

import random
from collections import Counter
from typing import cast

import pytest

from inflight.structured_output.backend import CompiledGrammar
from inflight.structured_output.compile_queue import Compilation, CompileQueue

HEAVY, LIGHT = 16_000, 100  # characters


def nothing() -> CompiledGrammar:
    return cast("CompiledGrammar", object())


def add(queue: CompileQueue, client: str, *lengths: int) -> list[Compilation]:
    return [queue.add(client, length, nothing, lambda: None) for length in lengths]


def take(queue: CompileQueue, count: int) -> list[Compilation]:
    """The next ones, each of which has ended before the next is taken."""
    taken = []
    for _ in range(count):
        taken.append(queue.take_next())
        queue.end(taken[-1])
    return taken


def test_one_client_fills_the_queue_and_the_grammar_of_another_one_is_next() -> None:
    queue = CompileQueue(100)
    add(queue, "many", *[HEAVY] * 50)
    take(queue, 5)
    [small] = add(queue, "other", LIGHT)
    assert take(queue, 1) == [small]


def test_a_small_grammar_comes_before_the_large_ones_of_many_clients() -> None:
    queue = CompileQueue(100)
    for i in range(20):
        add(queue, f"attacker {i}", HEAVY, HEAVY)
    take(queue, 3)
    [small] = add(queue, "other", LIGHT)
    assert take(queue, 1) == [small]


def test_clients_take_turns_although_one_has_small_grammars_only() -> None:
    queue = CompileQueue(100)
    add(queue, "many", *[LIGHT] * 60)
    add(queue, "few", *[2_000] * 10)
    clients = Counter(each.client for each in take(queue, 20))
    assert 6 <= clients["few"] <= 10


def test_the_shortest_of_one_client_comes_first_and_a_long_one_comes_at_last() -> None:
    queue = CompileQueue(1000)
    [long, middle, short] = add(queue, "a", HEAVY, 500, LIGHT)
    assert take(queue, 2) == [short, middle]
    seen = []
    while long not in seen:  # ever new short ones arrive
        add(queue, "a", LIGHT)
        seen += take(queue, 1)
        assert len(seen) < 10


def test_grammars_of_one_length_stay_in_order() -> None:
    queue = CompileQueue(100)
    added = add(queue, "", *[LIGHT] * 9)
    assert take(queue, 9) == added


def test_the_client_with_most_loses_its_newest() -> None:
    queue = CompileQueue(4)
    *_, newest = add(queue, "many", LIGHT, HEAVY, LIGHT)
    add(queue, "few", LIGHT)
    assert queue.is_full_for("many")
    assert not queue.is_full_for("few")
    assert not queue.is_full_for("new")
    assert queue.take_newest() is newest
    assert queue.take_newest() is None, "there is room now"
    add(queue, "new", LIGHT)
    assert queue.is_full_for("many")


def test_who_has_as_many_as_the_others_is_refused_itself() -> None:
    queue = CompileQueue(2)
    add(queue, "a", LIGHT)
    add(queue, "b", LIGHT)
    assert queue.is_full_for("a") and queue.is_full_for("b")
    assert not queue.is_full_for("c")


@pytest.mark.parametrize("seed", range(5))
def test_each_compilation_is_taken_once_and_clients_that_are_gone_leave_nothing(seed: int) -> None:
    draw = random.Random(seed)
    queue = CompileQueue(30)
    waiting: list[Compilation] = []
    running: list[Compilation] = []
    for _ in range(2_000):
        action = draw.choice(["add", "add", "take", "remove", "end"])
        client = draw.choice("abcde")
        if action == "add" and not queue.is_full_for(client):
            if (refused := queue.take_newest()) is not None:
                waiting.remove(refused)
            waiting += add(queue, client, draw.choice([LIGHT, 500, HEAVY]))
            assert len(waiting) <= 30
        elif action == "take" and waiting:
            running.append(queue.take_next())
            waiting.remove(running[-1])
        elif action == "remove" and waiting:
            queue.remove(waiting.pop(draw.randrange(len(waiting))))
        elif action == "end" and running:
            queue.end(running.pop(draw.randrange(len(running))))
    while waiting:
        running.append(queue.take_next())
        waiting.remove(running[-1])
    for each in running:
        queue.end(each)
    assert not queue._waiting and not queue._taken and not queue._num_present
