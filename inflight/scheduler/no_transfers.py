"""`NoTransfers`: the `Transfers` of an engine that keeps no KV blocks outside of its cache. They do nothing."""

from collections import Counter

from inflight.kv_cache.block_pool import BlockPool
from inflight.scheduler.request import Request
from inflight.scheduler.transfers import Transfers


class NoTransfers(Transfers):
    is_busy = is_running = False

    def __init__(self) -> None:
        self.host_pool, self.referenced_blocks = BlockPool(1), Counter[int]()

    def awaits(self, request: Request) -> bool:
        return False

    def begin(self, request: Request, last: int) -> bool:
        return False

    def settle(self) -> None:
        pass

    def record_committed(self, request: Request, first: int) -> None:
        pass

    def record_release(self, request: Request, *, has_last_state: bool) -> None:
        pass

    def end_step(self, num_tokens: int, num_rows: int, seconds: float) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass

    def reset(self, *, with_host_pool: bool) -> None:
        pass

    def forget_tiers(self) -> None:
        pass

    def take_counts(self) -> None:
        return None

    def wait(self, seconds: float) -> None:
        pass

    def check_integrity(self) -> None:
        pass
