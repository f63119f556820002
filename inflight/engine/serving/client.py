"""Which client a request is from, and `Shares`, which keep one client from filling a queue for all others."""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Hashable
from contextvars import ContextVar

# A name for the client of the request that this task answers. The server sets it to the digest of the API key, or to the
# address and port of the connection. "" for a program that uses the engine itself.
CLIENT: ContextVar[str] = ContextVar("inflight_client", default="")

KEPT_PART = 8  # one of this many parts of a limit is kept for other clients,
KEPT_SECONDS = 600.0  # if there was another client within this time


def short_client() -> str:
    """A short name for the present client: the same for the same key in all front ends. The key cannot be found from it."""
    client = CLIENT.get()
    return hashlib.sha256(client.encode()).hexdigest()[:12] if client else ""


class Shares:
    """How much of a limited amount each client has. The last eighth of the amount is kept from a client that has more than
    half of all, if another client was there in the last ten minutes. So a client that is alone may use the whole amount, and a
    client that fills it is refused before the others are."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._held: dict[Hashable, tuple[str, int]] = {}
        self._of_clients: Counter[str] = Counter()
        self._total = 0
        self._newest: dict[str, float] = {}  # the last two clients, and when they were here last

    def most(self, client: str, limit: int) -> int:
        """How much of `limit` may be in use, all clients together, if this client takes more."""
        now = self._now()
        has_others = any(each != client and now - seen < KEPT_SECONDS for each, seen in self._newest.items())
        self._newest.pop(client, None)
        self._newest[client] = now
        if len(self._newest) > 2:
            del self._newest[next(iter(self._newest))]
        if has_others and 2 * self._of_clients[client] > self._total:
            return limit - limit // KEPT_PART
        return limit

    def hold(self, holder: Hashable, client: str, amount: int) -> None:
        """The client has `amount` for `holder`, for example a request, from now on."""
        self.release(holder)
        self._held[holder] = client, amount
        self._of_clients[client] += amount
        self._total += amount

    def release(self, holder: Hashable) -> None:
        client, amount = self._held.pop(holder, ("", 0))
        self._of_clients[client] -= amount
        self._total -= amount
        if not self._of_clients[client]:
            del self._of_clients[client]
