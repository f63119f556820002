"""Requests that wait: the order in which they are served, and those that are held until they can be admitted."""

from __future__ import annotations

import heapq

from inflight.scheduler.request import Request, RequestStatus


class RequestQueue:
    """Ordered by arrival ("fcfs"), or by (priority, arrival) with the lower number first. A preempted request keeps its place.

    A request that cannot be admitted yet is *held* until an event: it waits and is counted, but plans do not look at it.
    `release` puts it back at its place in the order. The name of an event is the id of a request.

    `remove` is lazy: a removed request stays in the heap until it comes first, or until most of the heap has been removed.

    Attributes:
        num_tokens: the tokens of all requests that wait, counted when they were pushed. A follower counts as 0, because its
            leader computes its prompt.
    """

    def __init__(self, policy: str) -> None:
        self._by_priority = policy == "priority"
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._num_tokens_of: dict[int, int] = {}  # of requests that wait, by their order
        self._held: set[int] = set()  # requests that wait, but are not in the heap
        self._held_until: dict[str, list[Request]] = {}  # event -> requests; some may have been removed
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
        """Add a request. If `is_held`, it is held until the event of its own id."""
        is_follower = request.core.prompt_leader is not None and request.status is RequestStatus.WAITING
        num_tokens = 0 if is_follower else request.num_tokens
        self._num_tokens_of[request.order] = num_tokens
        self.num_tokens += num_tokens
        if is_held:
            self._hold(request, request.request_id)
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

    def hold_first(self, event: str) -> None:
        """Hold the request that `peek` returns until `event`."""
        self._hold(self._pop_heap(), event)

    def release(self, event: str) -> None:
        """Put back the requests that are held until `event`."""
        for request in self._held_until.pop(event, ()):
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

    def _hold(self, request: Request, event: str) -> None:
        self._held.add(request.order)
        self._held_until.setdefault(event, []).append(request)

    def _pop_heap(self) -> Request:
        request = self.peek()
        assert request is not None
        heapq.heappop(self._heap)
        return request
