"""`NoTransfers`: what the scheduler asks of transfers of KV blocks, for an engine that keeps none outside of its cache."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from inflight.interface.statistics import TransferCounts
from inflight.scheduler.request import Request


class NoTransfers:
    """`KVTransfers` inherits from this class, and is used in an engine that has a slab.

    Attributes:
        on_news: called in any thread when a call of the ranks has ended. Then `settle` should be called soon.
        is_busy: whether requests wait for a transfer.
        is_running: whether a transfer runs. It holds blocks, so there may be too few free ones to admit a request.
        held_blocks: block of the arena -> number of references that transfers hold to it. For tests.
    """

    def __init__(self) -> None:
        self._waits: dict[str, Any] = {}  # by request id; Any: `KVTransfers` knows what
        self._num_running = 0
        self.held_blocks = Counter[int]()
        self.on_news: Callable[[], None] = lambda: None

    @property
    def is_busy(self) -> bool:
        return bool(self._waits)

    @property
    def is_running(self) -> bool:
        return self._num_running > 0

    def awaits(self, request: Request) -> bool:
        """Whether the request must wait until `on_brought` is called."""
        return request.request_id in self._waits

    def begin(self, request: Request, last: int) -> bool:
        """Begin to bring the blocks of the tokens before position `last`. (The request computes the token at `last` itself.)
        Returns whether the request must wait until `on_brought` is called. Called once for each admission of the request, and
        again if there was no room."""
        return False

    def settle(self) -> None:
        """Go on with the transfers whose calls have ended. Release the requests that have waited long enough."""

    def note_committed(self, request: Request, first: int) -> None:
        """The blocks of the request from number `first` on have been committed. The first time after an admission `first` is
        0: found blocks may not have been saved for the request that computed them."""

    def note_release(self, request: Request, *, has_last_state: bool) -> None:
        """The request ends or is preempted, and will give up its blocks. `has_last_state`: the state after its last full block
        was named."""

    def end_step(self, num_tokens: int, num_rows: int, seconds: float) -> None:
        """Called when all requests of a step are committed: save their new blocks, and learn how long tokens compute."""

    def forget(self, request: Request) -> None:
        """The request has ended."""

    def reset(self, *, with_slab: bool) -> None:
        """Blocks that are being copied will join neither prefix cache nor slab. With `with_slab` also empty the slab."""

    def forget_tiers(self) -> None:
        """Use new keys in the tiers until this process ends: it finds no block that is stored now, and no other engine finds
        the blocks that it stores later. The next process begins with the first keys again."""

    def take_counts(self) -> TransferCounts | None:
        """Returns what the transfers have done since the last call."""
        return None

    def wait(self, seconds: float) -> None:
        """Wait until a call of the ranks has ended, but at most `seconds`."""

    def check_integrity(self) -> None:
        """Assert that nothing is held while no transfer runs. For tests."""
