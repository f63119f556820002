"""`Transfers`: what the scheduler asks of transfers of KV blocks between the arena and the storage outside of it.

There are two: `KVTransfers` of an engine with a host pool (kv_transfers.py), and `NoTransfers` of an engine without one.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from inflight.config.kv_transfer import KVTransferConfig
from inflight.errors import ErrorKind
from inflight.interface.statistics import TransferCounts
from inflight.interface.worker import TierCounts
from inflight.kv_cache.block_pool import BlockPool
from inflight.scheduler.request import Request


class Transfers(ABC):
    """
    Attributes:
        host_pool: the index of the host pool; empty if there is none.
        referenced_blocks: block of the arena -> number of references that transfers hold to it. For tests.
    """

    host_pool: BlockPool
    referenced_blocks: Counter[int]

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether requests wait for a transfer."""

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether a transfer runs. It holds blocks, so there may be too few free ones to admit a request."""

    @abstractmethod
    def awaits(self, request: Request) -> bool:
        """Whether the request must wait until `TransferListener.record_brought` is called."""

    @abstractmethod
    def begin(self, request: Request, last: int) -> bool:
        """Begin to bring the blocks of the tokens before position `last`. (The request computes the token at `last` itself.)
        Returns whether the request must wait until `TransferListener.record_brought` is called. Called once for each admission
        of the request, and again if there was no room."""

    @abstractmethod
    def settle(self) -> None:
        """Go on with the transfers whose calls have ended. Release the requests that have waited long enough."""

    @abstractmethod
    def record_committed(self, request: Request, first: int) -> None:
        """The blocks of the request from number `first` on have been committed. The first time after an admission `first` is
        0: found blocks may not have been saved for the request that computed them."""

    @abstractmethod
    def record_release(self, request: Request, *, has_last_state: bool) -> None:
        """The request ends or is preempted, and will give up its blocks. `has_last_state`: the state after its last full block
        was named."""

    @abstractmethod
    def end_step(self, num_tokens: int, num_rows: int, seconds: float) -> None:
        """Called when all requests of a step are committed: save their new blocks, and learn how long tokens compute."""

    @abstractmethod
    def forget(self, request: Request) -> None:
        """The request has ended."""

    @abstractmethod
    def reset(self, *, with_host_pool: bool) -> None:
        """Blocks that are being copied will join neither prefix cache nor host pool. With `with_host_pool` also empty the
        host pool."""

    @abstractmethod
    def forget_tiers(self) -> None:
        """Use new keys in the tiers until this process ends: it finds no block that is stored now, and no other engine finds
        the blocks that it stores later. The next process begins with the first keys again."""

    @abstractmethod
    def take_counts(self) -> TransferCounts | None:
        """Returns what the transfers have done since the last call; None if there is no host pool."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Wait until a call of the ranks has ended, but at most `seconds`."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Assert that nothing is held while no transfer runs. For tests."""


class TransferListener(Protocol):
    """The scheduler, as transfers see it."""

    def record_brought(self, request: Request) -> None:
        """The request need not wait any more."""

    def fail(self, request_id: str, reason: str, kind: ErrorKind) -> None:
        """End a request whose blocks could not be loaded, because the configuration says so."""


class TransferCalls(Protocol):
    """The methods `kv_save`, `kv_stored`, ... of all ranks (`WorkerBase`), called while steps go on. A future has the value of
    each rank."""

    def save(
        self, transfer_id: int, blocks: Sequence[int], slots: Sequence[int], keys: Sequence[Sequence[bytes]]
    ) -> Future[list[bool]]: ...

    def stored(self, transfer_id: int) -> Future[list[tuple[bool, TierCounts]]]: ...

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> Future[list[bool]]: ...

    def fetch(
        self, keys: Sequence[bytes], slots: Sequence[int], chunks: Sequence[tuple[bytes, int]]
    ) -> Future[list[tuple[list[bool], TierCounts]]]: ...

    def touch(self, keys: Sequence[Sequence[bytes]]) -> Future[list[tuple[list[bool], TierCounts]]]: ...

    def restore(
        self, keys: Sequence[Sequence[bytes]], slots: Sequence[int]
    ) -> Future[list[tuple[bool, TierCounts]]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSetup:
    """What `KVTransfers` needs beside the scheduler's parts.

    Attributes:
        num_slots: the size of the host pool in blocks.
        block_bytes: the bytes of one block, all ranks together.
        on_news: called in any thread when a call has ended. Then `Transfers.settle` should be called soon.
    """

    config: KVTransferConfig
    num_slots: int
    block_bytes: int
    calls: TransferCalls
    on_news: Callable[[], None]
