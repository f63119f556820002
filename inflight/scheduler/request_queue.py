"""Requests that wait: the order in which they are served, and those that are held until they can be admitted."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from inflight.scheduler.request import Request, RequestStatus


class RequestQueue:
    """Ordered by arrival ("fcfs"), or by (priority, arrival) with the lower number first. A preempted request keeps its place.

    A request that cannot be admitted yet is *held*: it waits and is counted, but is not in the heap, so that plans do not look
    at it. `release` puts it back at its place in the order.

    `remove` is lazy: a removed request stays in the heap until it is the first, or until removed ones are the larger part.

    Attributes:
        num_tokens: of all requests that wait, counted when they were pushed. Followers have none: their leader computes them.
    """

    def __init__(self, policy: str) -> None:
        self._by_priority = policy == "priority"
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._num_tokens_of: dict[int, int] = {}  # of requests that wait, by their order
        self._held: set[int] = set()  # requests that wait, but are not in the heap
        self.num_tokens = 0

    def __len__(self) -> int:
        """How many requests wait, including held ones."""
        return len(self._num_tokens_of)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def key(self, request: Request) -> tuple[int, int]:
        return (request.core.priority if self._by_priority else 0, request.order)

    def push(self, request: Request, *, is_held: bool = False) -> None:
        is_follower = request.core.prompt_leader is not None and request.status is RequestStatus.WAITING
        num_tokens = 0 if is_follower else request.num_tokens
        self._num_tokens_of[request.order] = num_tokens
        self.num_tokens += num_tokens
        if is_held:
            self._held.add(request.order)
        else:
            heapq.heappush(self._heap, (self.key(request), request))

    def peek(self) -> Request | None:
        """The first request that is not held."""
        while self._heap and self._heap[0][1].order not in self._num_tokens_of:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Remove and return the request that `peek` returns."""
        request = self._pop_heap()
        self.num_tokens -= self._num_tokens_of.pop(request.order)
        return request

    def hold_first(self) -> Request:
        """Hold the request that `peek` returns, and return it."""
        request = self._pop_heap()
        self._held.add(request.order)
        return request

    def release(self, request: Request) -> None:
        """Put back a held request. Does nothing if the request has been removed meanwhile."""
        if request.order in self._held:
            self._held.remove(request.order)
            heapq.heappush(self._heap, (self.key(request), request))

    def is_held(self, request: Request) -> bool:
        return request.order in self._held

    def remove(self, request: Request) -> None:
        """Take out a request that will not come again."""
        self.num_tokens -= self._num_tokens_of.pop(request.order)
        self._held.discard(request.order)
        if len(self._heap) > 2 * (len(self) - len(self._held)):
            self._heap = [entry for entry in self._heap if entry[1].order in self._num_tokens_of]
            heapq.heapify(self._heap)

    def _pop_heap(self) -> Request:
        request = self.peek()
        assert request is not None
        heapq.heappop(self._heap)
        return request


class Followers:
    """Holds the children of n > 1, except the first, while that one, their leader, computes the prompt.

    A follower may be admitted when earlier plans compute the prompt except its last token. Then it shares the leader's blocks.
    These steps may still be in flight: the follower's step runs after them, and if one of them fails, it is void, too.

    Args:
        requests: the scheduler's dict of all requests that have not ended, by id.
        queue: the scheduler's queue of waiting requests.
    """

    def __init__(self, requests: Mapping[str, Request], queue: RequestQueue, block_size: int) -> None:
        self._requests = requests
        self._queue = queue
        self._block_size = block_size
        self._held: dict[str, list[Request]] = {}  # by the id of the leader; some may have been aborted

    def must_wait(self, request: Request) -> bool:
        """Whether the request is a follower whose leader has prompt tokens left that no plan computes."""
        if request.status is not RequestStatus.WAITING or request.num_prompt_tokens <= self._block_size:
            return False
        leader = self._requests.get(request.core.prompt_leader or "")
        return leader is not None and not _is_ready(leader)

    def hold_first(self) -> None:
        """Hold the first request of the queue until its leader is ready or has ended."""
        follower = self._queue.hold_first()
        self._held.setdefault(follower.core.prompt_leader or "", []).append(follower)

    def release(self, leader: Request) -> None:
        """Put followers back if their leader is ready or has ended. Called whenever either may have happened."""
        if leader.request_id in self._held and (_is_ready(leader) or leader.status is RequestStatus.FINISHED):
            for follower in self._held.pop(leader.request_id):
                self._queue.release(follower)

    def running_leader(self, request: Request) -> Request | None:
        """The leader whose prompt blocks the follower shares when it is first admitted. None if the leader does not run."""
        leader = self._requests.get(request.core.prompt_leader or "")
        if leader is None or leader.status is not RequestStatus.RUNNING or request.status is not RequestStatus.WAITING:
            return None
        return leader


def _is_ready(leader: Request) -> bool:
    return leader.num_computed_tokens >= leader.num_prompt_tokens - 1
