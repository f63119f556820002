"""`RequestQueue`: who is served next. One heap serves both policies; a request keeps its place when it is preempted."""

from __future__ import annotations

import heapq

from inflight.scheduler.request import Request, RequestStatus


class RequestQueue:
    """Ordered by arrival ("fcfs"), or by (priority, arrival) with the lower number first.

    `remove` is lazy: a request that is FINISHED stays in the heap until it comes up, and is then passed over.
    """

    def __init__(self, policy: str) -> None:
        self._by_priority = policy == "priority"
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def num_tokens(self) -> int:
        """Of all requests that wait. It looks at each of them."""
        return sum(request.num_tokens for _, request in self._heap if request.status is not RequestStatus.FINISHED)

    def key(self, request: Request) -> tuple[int, int]:
        return (request.core.priority if self._by_priority else 0, request.order)

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (self.key(request), request))
        self._length += 1

    def peek(self) -> Request | None:
        while self._heap and self._heap[0][1].status is RequestStatus.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        request = self.peek()
        assert request is not None
        heapq.heappop(self._heap)
        self._length -= 1
        return request

    def remove(self, request: Request) -> None:
        """Take out a request whose status has been set to FINISHED."""
        assert request.status is RequestStatus.FINISHED
        self._length -= 1
