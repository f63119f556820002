"""`RequestQueue`: what is counted of those that wait, and what is kept of those that do not any more."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from inflight.interface.request import EngineCoreRequest, ResolvedSampling
from inflight.kv_cache.request_blocks import RequestBlocks
from inflight.sampling_params import SamplingParams
from inflight.scheduler.request import Request, RequestStatus
from inflight.scheduler.request_queue import RequestQueue

SAMPLING = ResolvedSampling(params=SamplingParams(), seed=0, max_tokens=9)


def request(order: int, num_tokens: int = 1, *, leader: str | None = None, priority: int = 0) -> Request:
    core = EngineCoreRequest(request_id=str(order), sampling=SAMPLING, prompt_leader=leader, priority=priority)
    prompt = np.ones(num_tokens, np.int32)
    return Request(core, prompt, order=order, blocks=RequestBlocks(([],), b""), max_model_len=10**6)


def test_a_prompt_counts_once_however_many_sequences_share_it() -> None:
    queue = RequestQueue("fcfs")
    children = [request(i, 40_000, leader="0" if i else None) for i in range(128)]
    for child in children:
        queue.push(child)
    assert (len(queue), queue.num_tokens) == (128, 40_000)
    queue.pop(children[0])
    assert queue.num_tokens == 0
    children[1].status = RequestStatus.PREEMPTED  # it has lost what it had: it computes its tokens itself
    queue.remove(children[1])
    queue.push(children[1])
    assert queue.num_tokens == 40_000
    children[1].append(7)  # of a step that was in flight
    queue.remove(children[1])
    assert (len(queue), queue.num_tokens) == (126, 0)


def test_what_was_removed_is_not_kept() -> None:
    queue = RequestQueue("fcfs")
    head = request(0)
    queue.push(head)
    for order in range(1, 100):  # each is sent, and its client goes, while the head waits
        late = request(order)
        queue.push(late)
        queue.remove(late)
        assert len(queue._heaps[0]) <= 2
    queue.pop(head)
    assert queue.peek() is None


def test_what_is_held_waits_and_is_not_shown() -> None:
    queue = RequestQueue("fcfs")
    held, first, second = request(0, 5), request(1, 7), request(2, 9)
    queue.push(held, is_deferred=True)
    queue.push(first)
    queue.push(second)
    queue.defer(first, "leader")
    assert queue.peek() is second
    assert (len(queue), queue.num_tokens, queue.num_deferred) == (3, 21, 2)
    queue.remove(held)
    queue.release("0")  # it has ended meanwhile
    assert queue.peek() is second
    assert (len(queue), queue.num_tokens, queue.num_deferred) == (2, 16, 1)
    queue.release("leader")
    queue.release("leader")
    for expected in (first, second):
        assert queue.peek() is expected
        queue.pop(expected)
    assert queue.peek() is None
    assert (len(queue), queue.num_tokens, queue.num_deferred) == (0, 0, 0)


def test_what_is_held_does_not_keep_what_was_removed() -> None:
    queue = RequestQueue("fcfs")
    for order in range(50):
        queue.push(request(order), is_deferred=True)
    for order in range(50, 150):
        late = request(order)
        queue.push(late)
        queue.remove(late)
        assert len(queue._heaps[0]) <= 2


def test_the_order_is_that_of_a_sorted_list() -> None:
    rng = random.Random(0)
    queue, waiting, held = RequestQueue("priority"), list[Request](), list[Request]()
    for order in range(800):
        action = rng.random()
        if held and action < 0.1:
            queue.release((released := rng.choice(held)).request_id)
            held.remove(released)
            waiting.append(released)
        elif held and action < 0.15:
            queue.remove(removed := rng.choice(held))
            held.remove(removed)
        elif waiting and action < 0.5:
            waiting.sort(key=queue.key)
            chosen = rng.choice([waiting[0], rng.choice(waiting)])
            if chosen is waiting[0] and rng.random() < 0.3:
                assert queue.peek() is chosen
                queue.defer(chosen, chosen.request_id)
                held.append(chosen)
            elif chosen is waiting[0]:
                queue.pop(chosen)
            else:
                queue.remove(chosen)
            waiting.remove(chosen)
        else:
            new = request(order, rng.randrange(1, 9), priority=rng.randrange(3))
            is_deferred = rng.random() < 0.2
            (held if is_deferred else waiting).append(new)
            queue.push(new, is_deferred=is_deferred)
        assert len(queue) == len(waiting) + len(held)
        assert queue.num_tokens == sum(each.num_tokens for each in waiting + held)
        assert queue.peek() is min(waiting, key=queue.key, default=None)


def test_short_requests_overtake_long_ones_of_their_priority() -> None:
    queue = RequestQueue("priority")
    long, short, low = request(0, priority=1), request(1, priority=1), request(2, priority=2)
    long.is_long = True
    for each in (low, short, long):
        queue.push(each)
    assert queue.peek() is long
    assert queue.peek(may_start_long=False) is short
    queue.pop(short)
    assert queue.peek(may_start_long=False) is None  # one of a lower priority waits behind the long one
    queue.remove(long)
    long.status = RequestStatus.PREEMPTED  # it has begun, so it goes on
    queue.push(long)
    assert queue.peek(may_start_long=False) is long
    queue.pop(long)
    assert queue.peek(may_start_long=False) is low


def test_the_tokens_of_short_requests_are_those_that_may_be_admitted() -> None:
    queue = RequestQueue("priority")
    high, same, low, held, removed, long = (request(order, 10, priority=order // 2) for order in range(6))
    same.core = replace(same.core, priority=1)
    low.core = replace(low.core, priority=2)
    for each in (held, removed, long):
        each.core = replace(each.core, priority=0)
    long.is_long = True
    for each in (high, same, low, removed, long):
        queue.push(each)
    queue.push(held, is_deferred=True)
    queue.remove(removed)
    assert [queue.num_short_tokens(priority, 1000) for priority in (-1, 0, 1, 2)] == [0, 10, 20, 30]
    assert queue.num_short_tokens(2, 15) == 15
    queue.remove(held)
    assert queue.num_deferred == 0 and len(queue) == 4


def test_a_request_marked_long_waits_with_the_long_ones() -> None:
    queue = RequestQueue("fcfs")
    first, second = request(0), request(1)
    queue.push(first)
    queue.push(second)
    queue.mark_long(first)
    assert first.is_long
    assert (queue.peek(), queue.peek(may_start_long=False)) == (first, second)
    queue.pop(first)
    assert queue.peek() is second
