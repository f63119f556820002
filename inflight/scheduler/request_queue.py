"""`RequestQueue`: the waiting requests, in the order in which they will be admitted."""

import heapq

from inflight.scheduler.request import Request, RequestStatus

_Entry = tuple[tuple[int, int], Request]


class RequestQueue:
    """Ordered by arrival ("fcfs"), or by (priority, arrival) with the lower number first. A preempted request keeps its place.

    A request that cannot be admitted before some event is *held*: it counts as waiting, but `peek` does not return it. There
    are two such events. Either the request's own grammar has been compiled: then the name of the event is its own id. Or its
    leader's prompt has been planned (a request is a follower of its leader, if it has the same prompt and shares the leader's
    blocks): then the name of the event is the leader's id. `release` puts the held requests back at their places in the order.

    Short requests may overtake long ones. So there are two heaps, one of short and one of long requests (`Request.is_long`).

    `remove` is lazy: a removed request stays in its heap until it is the first there, or until the heap is much too large.

    Attributes:
        num_tokens: the tokens of all waiting requests, counted when they were pushed. A follower that has never run
            counts as 0, because another request computes its prompt.
    """

    def __init__(self, policy: str) -> None:
        self._by_priority = policy == "priority"
        self._heaps: tuple[list[_Entry], list[_Entry]] = ([], [])  # of short and of long requests
        self._num_tokens_of: dict[int, int] = {}  # `order` of a waiting request -> its number of tokens
        self._deferred: set[int] = set()  # `order` of waiting requests that are not in a heap
        self._deferred_until: dict[str, list[Request]] = {}  # event -> requests; some may have been removed
        self.num_tokens = 0

    def __len__(self) -> int:
        """How many requests wait, including those that are held."""
        return len(self._num_tokens_of)

    @property
    def num_deferred(self) -> int:
        return len(self._deferred)

    def key(self, request: Request) -> tuple[int, int]:
        return (request.core.priority if self._by_priority else 0, request.order)

    def push(self, request: Request, *, is_deferred: bool = False) -> None:
        """Add a request. If `is_deferred`, it is deferred until its own grammar has been compiled."""
        is_follower = request.core.prompt_leader is not None and request.status is RequestStatus.WAITING
        num_tokens = 0 if is_follower else request.num_tokens
        self._num_tokens_of[request.order] = num_tokens
        self.num_tokens += num_tokens
        if is_deferred:
            self._defer(request, request.request_id)
        else:
            self._push_heap(request)

    def peek(self, *, may_start_long: bool = True) -> Request | None:
        """Returns the first request that is not held; None if there is none.

        If `may_start_long` is false, and this request is long and has never run, returns the first short request instead.
        Returns None if this short request has another priority, or if there is no short request.
        """
        for heap in self._heaps:
            while heap and heap[0][1].order not in self._num_tokens_of:
                heapq.heappop(heap)
        tops = [heap[0] for heap in self._heaps if heap]
        if not tops:
            return None
        (priority, _), first = min(tops)  # no two keys are equal
        if may_start_long or not first.is_long or first.status is RequestStatus.PREEMPTED:
            return first
        short = self._heaps[0][0] if self._heaps[0] else None
        return short[1] if short is not None and short[0][0] == priority else None

    def pop(self, request: Request) -> None:
        """Remove a request that is not held. If `peek` returned it, this is fast."""
        heap = self._heaps[request.is_long]
        if heap[0][1] is request:
            heapq.heappop(heap)
        else:
            heap[:] = [entry for entry in heap if entry[1] is not request]
            heapq.heapify(heap)
        self.num_tokens -= self._num_tokens_of.pop(request.order)

    def mark_long(self, request: Request) -> None:
        """Move a request that `peek` returned from the short to the long requests."""
        heapq.heappop(self._heaps[False])
        request.is_long = True
        self._push_heap(request)

    def num_short_tokens(self, priority: int, most: int) -> int:
        """Returns the tokens of all short requests that are not held and whose priority number is at most `priority`. The
        result is at most `most`."""
        total = 0
        for (number, order), request in self._heaps[0]:
            if number <= priority and order in self._num_tokens_of:
                total += request.num_tokens
                if total >= most:
                    return most
        return total

    def defer(self, request: Request, event: str) -> None:
        """Hold, until `event`, a request that `peek` has returned."""
        heapq.heappop(self._heaps[request.is_long])
        self._defer(request, event)

    def release(self, event: str) -> None:
        """Put back the requests that were held until `event`."""
        for request in self._deferred_until.pop(event, ()):
            if request.order in self._deferred:
                self._deferred.remove(request.order)
                self._push_heap(request)

    def is_deferred(self, request: Request) -> bool:
        return request.order in self._deferred

    def remove(self, request: Request) -> None:
        """Remove a waiting request that has ended."""
        self.num_tokens -= self._num_tokens_of.pop(request.order)
        self._deferred.discard(request.order)
        heap = self._heaps[request.is_long]
        if len(heap) > 2 * (len(self) - len(self._deferred)):
            heap[:] = [entry for entry in heap if entry[1].order in self._num_tokens_of]
            heapq.heapify(heap)

    def _push_heap(self, request: Request) -> None:
        heapq.heappush(self._heaps[request.is_long], (self.key(request), request))

    def _defer(self, request: Request, event: str) -> None:
        self._deferred.add(request.order)
        self._deferred_until.setdefault(event, []).append(request)
