"""`FairQueue`: in which order clients get their jobs done, and who is refused."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from inflight.fair_queue import FairQueue, Waiting

HEAVY, LIGHT, USUAL = 20_000.0, 4_200.0, 6_000.0
Queue = FairQueue[None]
Job = Waiting[None]


def add(queue: Queue, client: str, *costs: float, size: int = 1) -> list[Job]:
    return [queue.add(None, client, cost, size) for cost in costs]


def take(queue: Queue, count: int) -> list[Job]:
    """The next ones, each of which has ended before the next is taken."""
    taken = []
    for _ in range(count):
        taken.append(queue.take_next())
        queue.end(taken[-1])
    return taken


def test_one_client_fills_the_queue_and_the_job_of_another_one_is_next() -> None:
    queue = Queue(100)
    add(queue, "many", *[HEAVY] * 50)
    take(queue, 5)
    [small] = add(queue, "other", LIGHT)
    assert take(queue, 1) == [small]


def test_a_small_job_comes_before_the_large_ones_of_many_clients() -> None:
    queue = Queue(100)
    for i in range(20):
        add(queue, f"attacker {i}", HEAVY, HEAVY)
    take(queue, 3)
    [small] = add(queue, "other", LIGHT)
    assert take(queue, 1) == [small]


def test_clients_take_turns_although_one_has_small_jobs_only() -> None:
    queue = Queue(100)
    add(queue, "many", *[LIGHT] * 60)
    add(queue, "few", *[USUAL] * 10)
    clients = Counter(each.client for each in take(queue, 20))
    assert 6 <= clients["few"] <= 10


def test_the_cheapest_of_one_client_comes_first_and_a_dear_one_comes_at_last() -> None:
    queue = Queue(1000)
    [long, middle, short] = add(queue, "a", HEAVY, USUAL, LIGHT)
    assert take(queue, 2) == [short, middle]
    seen = []
    while long not in seen:  # ever new short ones arrive
        add(queue, "a", LIGHT)
        seen += take(queue, 1)
        assert len(seen) < 10


def test_jobs_of_one_cost_stay_in_order() -> None:
    queue = Queue(100)
    added = add(queue, "", *[LIGHT] * 9)
    assert take(queue, 9) == added


def test_the_client_with_most_loses_its_newest() -> None:
    queue = Queue(4)
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
    queue = Queue(2)
    add(queue, "a", LIGHT)
    add(queue, "b", LIGHT)
    assert queue.is_full_for("a") and queue.is_full_for("b")
    assert not queue.is_full_for("c")


def test_a_large_job_has_room_only_if_nothing_waits_or_others_take_up_more() -> None:
    queue = Queue(10)
    assert not queue.is_full_for("a", 99)
    add(queue, "a", LIGHT, size=4)
    [newest] = add(queue, "a", HEAVY, size=4)
    assert not queue.is_full_for("b", 8) and queue.is_full_for("b", 9) and queue.is_full_for("a", 3)
    assert queue.take_newest(6) is newest
    assert queue.take_newest(6) is None


def test_a_client_pays_what_its_job_was_and_not_what_it_seemed_to_be() -> None:
    queue = Queue(100)
    add(queue, "bombs", *[LIGHT] * 20)
    add(queue, "honest", *[LIGHT] * 20)
    seen: Counter[str] = Counter()
    for _ in range(20):
        taken = queue.take_next()
        seen[taken.client] += 1
        queue.end(taken, 9 * LIGHT if taken.client == "bombs" else LIGHT)
    assert 2 <= seen["bombs"] <= 4


@pytest.mark.parametrize("seed", range(5))
def test_each_job_is_taken_once_and_clients_that_are_gone_leave_nothing(seed: int) -> None:
    draw = random.Random(seed)
    queue = Queue(30)
    waiting: list[Job] = []
    running: list[Job] = []
    for _ in range(2_000):
        action = draw.choice(["add", "add", "take", "remove", "end"])
        client = draw.choice("abcde")
        if action == "add" and not queue.is_full_for(client):
            if (refused := queue.take_newest()) is not None:
                waiting.remove(refused)
            waiting += add(queue, client, draw.choice([LIGHT, USUAL, HEAVY]))
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
