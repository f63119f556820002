"""`CompileQueue`: the grammars that wait to be compiled, and the order in which they get a thread.

Clients take turns (fair queueing, Demers et al. 1989): a grammar is due when it would be compiled if all clients with grammars
in the queue got equal shares of the work. So the many grammars of one client delay only this client. Of the grammars of one
client the shortest comes first. Of several new clients, the one with the shortest grammar comes first. No grammar waits for
ever, because grammars that arrive later are due later.

If the queue is full, a grammar of the client with the most grammars in it is refused: its newest one, or the one that it is
sending.
"""

import bisect
import itertools
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from inflight.structured_output.backend import CompiledGrammar

GRAMMAR_COST = 2**12  # what a grammar costs beside its characters: a short text may be as much work as a long one


@dataclass(eq=False, slots=True)
class Compilation:
    """
    Attributes:
        due: when it is due if its client has no other grammars here; a virtual time in characters (`CompileQueue`).
        number: in the order of arrival.
        cost: in characters.
        forget: called if it is refused after it was accepted, before its future fails.
    """

    due: float
    number: int
    cost: int
    client: str
    compile: Callable[[], CompiledGrammar]
    forget: Callable[[], None]
    future: Future[CompiledGrammar] = field(default_factory=Future)

    def __lt__(self, other: "Compilation") -> bool:
        """Whether it comes before another one of the same client."""
        return (self.due, self.number) < (other.due, other.number)


class CompileQueue:
    """Its caller holds a lock.

    The virtual time, `_now`, is how many characters the queue would have compiled for each client, if it compiled the grammars
    of all clients at the same time. The next grammar of a client is due `cost` characters after it arrived, or
    after the client's last one was due if that is later.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._now = 0.0
        self._numbers = itertools.count()
        self._waiting: dict[str, list[Compilation]] = {}  # by client; sorted, the next one first
        self._taken: dict[str, float] = {}  # for each client that has compilations: when its last one was due
        self._num_present: Counter[str] = Counter()  # for each client: how many of its compilations wait or run
        self._size = 0

    def add(
        self,
        client: str,
        num_characters: int,
        compile_grammar: Callable[[], CompiledGrammar],
        forget: Callable[[], None],
    ) -> Compilation:
        cost = GRAMMAR_COST + num_characters
        added = Compilation(self._now + cost, next(self._numbers), cost, client, compile_grammar, forget)
        bisect.insort(self._waiting.setdefault(client, []), added)
        self._num_present[client] += 1
        self._size += 1
        return added

    def is_full_for(self, client: str) -> bool:
        """Whether the queue is full, and no client has more in it than this one."""
        most = max(map(len, self._waiting.values()), default=0)
        return self._size >= self._max_size and len(self._waiting.get(client, ())) >= most

    def take_newest(self) -> Compilation | None:
        """If the queue is full, take the newest compilation of the client that has most in it."""
        if self._size < self._max_size:
            return None
        of_client = max(self._waiting.values(), key=lambda waiting: len(waiting))
        newest = max(of_client, key=lambda each: each.number)
        self.remove(newest)
        return newest

    def take_next(self) -> Compilation:
        """Take the compilation that is due next. The caller calls `end` when it has ended. The queue is not empty."""
        due, _, following = min(
            (self._due(waiting[0]), self._taken.get(client, 0.0), waiting[0])
            for client, waiting in self._waiting.items()
        )  # if two are due at the same time, the client whose last turn was earlier comes first
        self._taken[following.client] = due
        self._now += following.cost / len(self._num_present)
        self._leave(following)
        return following

    def remove(self, waiting: Compilation) -> None:
        """Take a compilation that waits, because it is no longer wanted."""
        self._leave(waiting)
        self.end(waiting)

    def end(self, taken: Compilation) -> None:
        """A compilation that `take_next` has returned no longer runs."""
        self._num_present[taken.client] -= 1
        if not self._num_present[taken.client]:
            del self._num_present[taken.client]
            self._taken.pop(taken.client, None)

    def _due(self, first: Compilation) -> float:
        return max(first.due, self._taken.get(first.client, 0.0) + first.cost)

    def _leave(self, waiting: Compilation) -> None:
        of_client = self._waiting[waiting.client]
        del of_client[bisect.bisect_left(of_client, waiting)]
        if not of_client:
            del self._waiting[waiting.client]
        self._size -= 1
