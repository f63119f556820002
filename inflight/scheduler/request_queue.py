"""`RequestQueue`: who is served next. One heap serves both policies; a request keeps its place when it is preempted."""

from __future__ import annotations

import heapq

from inflight.scheduler.request import Request, RequestStatus


class RequestQueue:
    """Ordered by arrival ("fcfs"), or by (priority, arrival) with the lower number first.

    `remove` is lazy: what is not there any more stays in the heap until it comes up, or until it is the larger part.

    Attributes:
        num_tokens: of all requests that wait, as they were when they came. A child whose prompt its leader computes has none.
    """

    def __init__(self, policy: str) -> None:
        self._by_priority = policy == "priority"
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._num_tokens_of: dict[int, int] = {}  # those that wait, by their order
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._num_tokens_of)

    def key(self, request: Request) -> tuple[int, int]:
        return (request.core.priority if self._by_priority else 0, request.order)

    def push(self, request: Request) -> None:
        is_follower = request.core.prompt_leader is not None and request.status is RequestStatus.WAITING
        num_tokens = 0 if is_follower else request.num_tokens
        heapq.heappush(self._heap, (self.key(request), request))
        self._num_tokens_of[request.order] = num_tokens
        self.num_tokens += num_tokens

    def peek(self) -> Request | None:
        while self._heap and self._heap[0][1].order not in self._num_tokens_of:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        request = self.peek()
        assert request is not None
        heapq.heappop(self._heap)
        self.num_tokens -= self._num_tokens_of.pop(request.order)
        return request

    def remove(self, request: Request) -> None:
        """Take out a request that will not come again."""
        self.num_tokens -= self._num_tokens_of.pop(request.order)
        if len(self._heap) > 2 * len(self):
            self._heap = [entry for entry in self._heap if entry[1].order in self._num_tokens_of]
            heapq.heapify(self._heap)
