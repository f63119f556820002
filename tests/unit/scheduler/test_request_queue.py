"""`RequestQueue`: what is counted of those that wait, and what is kept of those that do not any more."""

from __future__ import annotations

import random

import numpy as np

from inflight.interface.request import EngineCoreRequest, ResolvedSampling
from inflight.kv_cache.manager import RequestBlocks
from inflight.sampling_params import SamplingParams
from inflight.scheduler.request import Request, RequestStatus
from inflight.scheduler.request_queue import RequestQueue

SAMPLING = ResolvedSampling(params=SamplingParams(), seed=0, max_tokens=9)


def request(order: int, num_tokens: int = 1, *, leader: str | None = None, priority: int = 0) -> Request:
    core = EngineCoreRequest(
        request_id=str(order),
        prompt_token_ids=np.ones(num_tokens, np.int32),
        sampling=SAMPLING,
        arrival_time=0.0,
        prompt_leader=leader,
        priority=priority,
    )
    return Request(core, order=order, blocks=RequestBlocks(([],), b""), max_model_len=10**6)


def test_a_prompt_counts_once_however_many_sequences_share_it() -> None:
    queue = RequestQueue("fcfs")
    children = [request(i, 40_000, leader="0" if i else None) for i in range(128)]
    for child in children:
        queue.push(child)
    assert (len(queue), queue.num_tokens) == (128, 40_000)
    assert queue.pop() is children[0]
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
        assert len(queue._heap) <= 2
    assert queue.pop() is head
    assert queue.peek() is None


def test_the_order_is_that_of_a_sorted_list() -> None:
    rng = random.Random(0)
    queue, waiting = RequestQueue("priority"), list[Request]()
    for order in range(500):
        if waiting and rng.random() < 0.45:
            waiting.sort(key=queue.key)
            chosen = rng.choice([waiting[0], rng.choice(waiting)])
            if chosen is waiting[0]:
                assert queue.pop() is chosen
            else:
                queue.remove(chosen)
            waiting.remove(chosen)
        else:
            waiting.append(request(order, rng.randrange(1, 9), priority=rng.randrange(3)))
            queue.push(waiting[-1])
        assert len(queue) == len(waiting)
        assert queue.num_tokens == sum(each.num_tokens for each in waiting)
        assert queue.peek() is min(waiting, key=queue.key, default=None)
