"""`RequestQueue`: the waiting requests, in the order in which they will be admitted."""

from __future__ import annotations

import heapq

from inflight.scheduler.request import Request, RequestStatus


class RequestQueue:
    """Ordered by arrival ("fcfs"), or by (priority, arrival) with the lower number first. A preempted request keeps its place.

    A request that cannot be admitted before some event is *held*: it counts as waiting, but `peek` does not return it. The name
    of an event is the id of a request: the event is that its grammar is compiled, or that its followers (requests with the same
    prompt, which share its blocks) may be admitted. `release` puts the held requests back at their places in the order.

    `remove` is lazy: a removed request stays in the heap until it is the first there, or until most of the heap is removed.

    Attributes:
        num_tokens: the tokens of all waiting requests, counted when they were pushed. A follower counts as 0, because
            another request computes its prompt.
    """

    def __init__(self, policy: str) -> None:
        self._by_priority = policy == "priority"
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._num_tokens_of: dict[int, int] = {}  # `order` of a waiting request -> its number of tokens
        self._held: set[int] = set()  # `order` of waiting requests that are not in the heap
        self._held_until: dict[str, list[Request]] = {}  # event -> requests; some may have been removed
        self.num_tokens = 0

    def __len__(self) -> int:
        """How many requests wait, including those that are held."""
        return len(self._num_tokens_of)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def key(self, request: Request) -> tuple[int, int]:
        return (request.core.priority if self._by_priority else 0, request.order)

    def push(self, request: Request, *, is_held: bool = False) -> None:
        """Add a request. If `is_held`, it is held until the event with its own id."""
        is_follower = request.core.prompt_leader is not None and request.status is RequestStatus.WAITING
        num_tokens = 0 if is_follower else request.num_tokens
        self._num_tokens_of[request.order] = num_tokens
        self.num_tokens += num_tokens
        if is_held:
            self._hold(request, request.request_id)
        else:
            heapq.heappush(self._heap, (self.key(request), request))

    def peek(self) -> Request | None:
        """Returns the first request that is not held; None if there is none."""
        while self._heap and self._heap[0][1].order not in self._num_tokens_of:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Remove and return the request that `peek` returns."""
        request = self._pop_heap()
        self.num_tokens -= self._num_tokens_of.pop(request.order)
        return request

    def hold_first(self, event: str) -> None:
        """Hold the request that `peek` returns, until `event`."""
        self._hold(self._pop_heap(), event)

    def release(self, event: str) -> None:
        """Put back the requests that were held until `event`."""
        for request in self._held_until.pop(event, ()):
            if request.order in self._held:
                self._held.remove(request.order)
                heapq.heappush(self._heap, (self.key(request), request))

    def is_held(self, request: Request) -> bool:
        return request.order in self._held

    def remove(self, request: Request) -> None:
        """Remove a waiting request that has ended."""
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
