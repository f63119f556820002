"""`FairQueue`: jobs of several clients that wait for a thread or a process, and the order in which they get it.

Clients take turns (fair queueing, Demers et al. 1989): a job is due when it would be done if all clients with jobs in the queue
got equal shares of the work. So the many jobs of one client delay only this client. Of the jobs of one client the cheapest
comes first. Of several new clients, the one with the cheapest job comes first. No job waits for ever, because jobs that arrive
later are due later.

If the queue is full, a job of the client that takes up most of it is refused: its newest one, or the one that it is sending.
"""

import bisect
import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Waiting(Generic[T]):
    """
    Attributes:
        job: what waits.
        due: when it is due if its client has no other jobs here; a virtual time (`FairQueue`).
        number: in the order of arrival.
        cost: how much work the job is expected to be.
        size: how much of the queue it takes up.
    """

    job: T
    due: float
    number: int
    cost: float
    size: int
    client: str

    def __lt__(self, other: "Waiting[T]") -> bool:
        """Whether it comes before another one of the same client."""
        return (self.due, self.number) < (other.due, other.number)


class FairQueue(Generic[T]):
    """Its caller holds a lock.

    The virtual time, `_now`, is how much work the queue would have done for each client so far, if it did the jobs of all
    clients at the same time. It moves when a job ends, because only then it is known how much work the job was. The next job of
    a client is due `cost` after it arrived, or after the client's last one was due if that is later. All costs have one unit,
    such as characters or seconds.

    Args:
        max_size: the most that may wait. If nothing waits, a job of any size has room.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._now = 0.0
        self._numbers = itertools.count()
        self._waiting: dict[str, list[Waiting[T]]] = {}  # by client; sorted, the next one first
        self._taken: dict[str, float] = {}  # for each client that has jobs: when its last one was due
        self._num_present: Counter[str] = Counter()  # for each client: how many of its jobs wait or run
        self._size = 0

    def __bool__(self) -> bool:
        """Whether something waits."""
        return bool(self._waiting)

    def add(self, job: T, client: str, cost: float, size: int = 1) -> Waiting[T]:
        added = Waiting(job, self._now + cost, next(self._numbers), cost, size, client)
        bisect.insort(self._waiting.setdefault(client, []), added)
        self._num_present[client] += 1
        self._size += size
        return added

    def is_full_for(self, client: str, size: int = 1) -> bool:
        """Whether the queue has no room for `size` more, and with it this client would take up more of it than any other."""
        return self._is_full(size) and self._size_of(client) + size > max(map(self._size_of, self._waiting))

    def take_newest(self, size: int = 1) -> Waiting[T] | None:
        """If the queue has no room for `size` more, take the newest job of the client that takes up most of it."""
        if not self._is_full(size):
            return None
        newest = max(self._waiting[max(self._waiting, key=self._size_of)], key=lambda each: each.number)
        self.remove(newest)
        return newest

    def take_next(self) -> Waiting[T]:
        """Take the job that is due next. The caller calls `end` when it has ended. The queue is not empty."""
        due, _, following = min(
            (self._due(waiting[0]), self._taken.get(client, 0.0), waiting[0])
            for client, waiting in self._waiting.items()
        )  # if two are due at the same time, the client whose last turn was earlier comes first
        self._taken[following.client] = due
        self._leave(following)
        return following

    def remove(self, waiting: Waiting[T]) -> None:
        """Take a job that waits, because it is no longer wanted."""
        self._leave(waiting)
        self._forget(waiting.client)

    def end(self, taken: Waiting[T], cost: float | None = None) -> None:
        """A job that `take_next` has returned no longer runs. `cost`: how much work it was, if that is known now. Its client
        pays what it was more than expected, and gets back what it was less."""
        cost = taken.cost if cost is None else cost
        self._taken[taken.client] += cost - taken.cost
        self._now += cost / len(self._num_present)
        self._forget(taken.client)

    def _forget(self, client: str) -> None:
        """The client has one job fewer."""
        self._num_present[client] -= 1
        if not self._num_present[client]:
            del self._num_present[client]
            self._taken.pop(client, None)

    def _is_full(self, size: int) -> bool:
        return bool(self._waiting) and self._size + size > self._max_size

    def _size_of(self, client: str) -> int:
        return sum(each.size for each in self._waiting.get(client, ()))

    def _due(self, first: Waiting[T]) -> float:
        return max(first.due, self._taken.get(first.client, 0.0) + first.cost)

    def _leave(self, waiting: Waiting[T]) -> None:
        of_client = self._waiting[waiting.client]
        del of_client[bisect.bisect_left(of_client, waiting)]
        if not of_client:
            del self._waiting[waiting.client]
        self._size -= waiting.size
