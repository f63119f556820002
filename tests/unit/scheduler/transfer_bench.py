"""`Bench`: `KVTransfers` one call at a time. The cache, the host pool's index and the requests are real; the ranks and the
clock are the test's."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from inflight.config.kv_tiers import KVTierConfig
from inflight.config.kv_transfer import KVTransferConfig
from inflight.errors import ErrorKind
from inflight.interface.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec
from inflight.interface.request import EngineCoreRequest, Int32Array, ResolvedSampling
from inflight.interface.statistics import TransferCounts
from inflight.kv_cache.manager import KVCacheManager
from inflight.sampling_params import SamplingParams
from inflight.scheduler import kv_fetches, kv_transfers
from inflight.scheduler.kv_transfers import KVTransfers
from inflight.scheduler.request import Request
from inflight.scheduler.transfers import TransferCalls, TransferSetup

BLOCK_BYTES = 1000
TIER = KVTierConfig(type="fs", path="/nowhere")
SAMPLING = ResolvedSampling(params=SamplingParams(), seed=0, max_tokens=10**6)


@dataclass
class Call:
    """A call of all ranks that has not ended."""

    action: str
    args: tuple[Any, ...]
    future: Future[Any]


class Bench:
    """
    Attributes:
        calls: those that have not ended.
        brought: the requests that need not wait any more.
        failed: the arguments of each call of `fail`.
        tiers: the wire keys that the tiers have.
    """

    def __init__(
        self,
        *,
        block_size: int = 4,
        num_blocks: int = 64,
        num_slots: int = 64,
        specs: Sequence[KVCacheSpec] = (),
        windows: Sequence[int | None] = (None,),
        **config: Any,
    ) -> None:
        shape: dict[str, Any] = {
            "block_size": block_size,
            "num_kv_heads": 1,
            "head_dim": 1,
            "dtype": "float32",
            "itemsize": 4,
        }
        specs = specs or [KVCacheSpec(**shape, sliding_window=window) for window in windows]
        groups = tuple(KVCacheGroup(layer_names=(f"layers.{i}",), spec=spec) for i, spec in enumerate(specs))
        cache = KVCacheConfig(num_blocks=num_blocks + 1, block_bytes=BLOCK_BYTES, groups=groups)
        self.kv_cache = KVCacheManager(cache, fingerprint="m", enable_prefix_caching=True)
        self.pool, self.block_size = self.kv_cache.pool, block_size
        self.calls: list[Call] = []
        self.brought: list[str] = []
        self.failed: list[tuple[str, str, ErrorKind]] = []
        self.tiers: set[bytes] = set()
        self.num_news = self._num_requests = 0
        actions = ("save", "stored", "load", "fetch", "touch", "restore")
        setup = TransferSetup(
            config=KVTransferConfig(cpu_bytes=1, **config),
            num_slots=num_slots,
            block_bytes=BLOCK_BYTES,
            calls=cast("TransferCalls", SimpleNamespace(**{name: partial(self._call, name) for name in actions})),
            on_news=self._note_news,
        )
        self.transfers = KVTransfers(self.kv_cache, setup, self)

    def _call(self, action: str, *args: Any) -> Future[Any]:
        self.calls.append(Call(action, args, Future()))
        return self.calls[-1].future

    def _note_news(self) -> None:
        self.num_news += 1

    def record_brought(self, request: Request) -> None:
        self.brought.append(request.request_id)

    def fail(self, request_id: str, reason: str, kind: ErrorKind) -> None:
        self.failed.append((request_id, reason, kind))

    # -- requests ------------------------------------------------------------------------------------------------------

    def request(self, token_ids: Int32Array, num_prompt_tokens: int | None = None, **limits: Any) -> Request:
        self._num_requests += 1
        prompt = token_ids[: num_prompt_tokens or len(token_ids)]
        emitted = tuple(token_ids[len(prompt) :].tolist())
        sampling = replace(SAMPLING, params=SamplingParams(**limits))
        core = EngineCoreRequest(request_id=f"r{self._num_requests}", sampling=sampling, emitted_token_ids=emitted)
        blocks = self.kv_cache.new_request("", len(prompt))
        return Request(core, prompt, order=self._num_requests, blocks=blocks, max_model_len=10**6)

    def compute(self, token_ids: Int32Array, num_prompt_tokens: int | None = None, **limits: Any) -> Request:
        """A request that is admitted, and computed in one step, which begins a save of its new blocks."""
        request = self.request(token_ids, num_prompt_tokens, **limits)
        blocks = request.blocks
        computed = self.kv_cache.get_computed_blocks(blocks, token_ids)
        assert self.kv_cache.allocate_slots(blocks, len(token_ids), computed) is not None
        self.kv_cache.commit(blocks, token_ids, len(token_ids))
        request.num_cached_tokens = len(computed[0]) * self.block_size
        self.transfers.record_committed(request, 0)
        self.transfers.end_step(1, 1, 0.0)
        return request

    def save(self, token_ids: Int32Array) -> None:
        """Afterwards the host pool has the blocks of these tokens, and no request has them."""
        self.kv_cache.free(self.compute(token_ids).blocks)
        self.end("save", True)
        if self.pending("stored"):
            self.end("stored", (True, {}))

    def forget_arena(self) -> None:
        self.kv_cache.reset_prefix_cache([])

    def begin(self, request: Request) -> bool:
        return self.transfers.begin(request, request.num_tokens - 1)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def pending(self, action: str) -> list[tuple[Any, ...]]:
        """The arguments of such calls that have not ended."""
        return [call.args for call in self.calls if call.action == action]

    def take(self, action: str) -> Call:
        call = next(call for call in self.calls if call.action == action)
        self.calls.remove(call)
        return call

    def end(self, action: str, *answers: Any) -> None:
        """End the oldest such call; `answers` are those of the ranks."""
        self.take(action).future.set_result(list(answers))
        self.transfers.settle()

    def end_fetch(self) -> list[bool]:
        """One rank answers with what the tiers have."""
        keys = self.pending("fetch")[0][0]
        found = list[bool]()
        for key in keys:
            found.append(key in self.tiers and all(found))
        self.end("fetch", (found, {"fs": {"hits": float(sum(found))}}))
        return found

    def counts(self) -> TransferCounts:
        counts = self.transfers.take_counts()
        assert counts is not None
        return counts

    def check_idle(self) -> None:
        assert not self.calls and not self.transfers.is_running and not self.transfers.is_busy
        self.transfers.check_integrity()
        self.kv_cache.check_integrity([], self.transfers.referenced_blocks)


class Clock:
    """In place of `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (kv_transfers, kv_fetches):
        monkeypatch.setattr(module, "time", made)
    return made


def tokens(count: int, first: int = 0) -> Int32Array:
    return np.arange(first, first + count, dtype=np.int32)


def with_tiers(bench: Bench, token_ids: Int32Array) -> list[bytes]:
    """The tiers, and nothing else, have these blocks afterwards. Returns their keys there."""
    bench.kv_cache.free(bench.compute(token_ids).blocks)
    keys = [key for together in bench.pending("save")[0][3] for key in together]
    bench.tiers.update(keys)
    bench.end("save", True)
    bench.end("stored", (True, {}))
    bench.forget_arena()
    bench.transfers.reset(with_host_pool=True)
    return keys
