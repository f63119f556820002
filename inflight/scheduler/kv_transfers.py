"""`KVTransfers`: copies blocks that were computed before into the arena, and computed blocks out of it.

    arena  <-- load --  host pool  <-- fetch --  tiers          arena  -- save -->  host pool  -- store -->  tiers

The ranks copy (kv_connector/rank_transfers.py); this object decides what they copy. The host pool's index is a second
`BlockPool` with the same keys, whose block ids are the numbers of slots. All ranks use the same slots. What a tier has is
not known: a fetch finds it out.

A *transfer* is a generator. Each `yield` waits for a call of all ranks, or for the end of another transfer. A transfer holds
references to the blocks and slots that it copies. So a request may end or be preempted, and the caches may be reset, at any
time. When a transfer has loaded blocks, they are in the prefix cache like all others, and it gives up its references. Then the
waiting request is admitted like any other, and finds its blocks in the prefix cache. If one was evicted, it is computed.

A request waits for blocks at most as long as computing them would take. It may wait UNKNOWN_WAIT_SECONDS if the engine has not
measured yet how fast it computes, or for blocks in the host pool. After that it computes, and the transfer goes on for others.

A tier may store several blocks of full attention that follow each other as one object, a *chunk* (`blocks_per_chunk`). So all
blocks of a chunk are saved at once, and a fetch says in which chunk a block is.
"""

import time
from collections import Counter, deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Any

from inflight.errors import ConfigError, EngineError, ErrorKind
from inflight.interface.statistics import TransferCounts
from inflight.kv_cache.arc_pool import ArcPool
from inflight.kv_cache.block_pool import BlockKey, BlockPool
from inflight.kv_cache.kept_blocks import KeptBlocks
from inflight.kv_cache.manager import KVCacheManager
from inflight.kv_cache.request_blocks import RequestBlocks
from inflight.scheduler.kv_fetches import KVFetches, smooth
from inflight.scheduler.kv_touches import KVTouches
from inflight.scheduler.request import Request
from inflight.scheduler.transfers import TransferListener, Transfers, TransferSetup

POOL_SHARE = 4  # all saves together hold at most 1/4 of the arena's blocks, and so do all loads, if more than one runs
# How long a request waits for the tiers: at least and at most these shares of the time that computing the blocks takes.
MIN_WAIT_SHARE, MAX_WAIT_SHARE = 0.2, 1.0
UNKNOWN_WAIT_SECONDS = (
    2.0  # for tiers, while the speed of computing is unknown; for the host pool, if computing takes less
)
PROBE_SECONDS = 10.0  # after so long, tiers that are slower than computing are tried again; no request waits for that

# Any: what a call of all ranks returned, one value for each rank
Transfer = Generator[Future[Any], list[Any], None]


@dataclass(slots=True)
class _Wait:
    """A request that waits for a transfer. `deadline`: a time of `time.monotonic()`. `fetch_seconds`: how long it waits for the
    tiers, from the end of the load from the host pool on."""

    request: Request
    deadline: float
    fetch_seconds: float


class KVTransfers(Transfers):
    """
    Raises:
        ConfigError: there is too little memory for `blocks_per_chunk`.
    """

    def __init__(self, kv_cache: KVCacheManager, setup: TransferSetup, listener: TransferListener) -> None:
        config, num_slots = setup.config, setup.num_slots
        self._kv_cache, self._config, self._calls = kv_cache, config, setup.calls
        self._listener, self._on_news = listener, setup.on_news
        self._pool, self.host_pool = kv_cache.pool, (ArcPool if config.uses_arc else BlockPool)(num_slots)
        self._block_bytes = setup.block_bytes
        self._share = self._pool.num_blocks // POOL_SHARE
        self._per_chunk = config.blocks_per_chunk
        # a fetch takes a chunk of each group from half of the free slots; slot 0 is the dummy
        min_blocks, min_slots = POOL_SHARE * self._per_chunk, 1 + 2 * self._per_chunk * kv_cache.num_groups
        if self._per_chunk > 1 and (self._pool.num_blocks < min_blocks or num_slots < min_slots):
            raise ConfigError(
                f"blocks_per_chunk={self._per_chunk} needs {min_blocks} blocks of the KV cache and {min_slots} of host memory; "
                f"they have {self._pool.num_blocks} and {num_slots}; lower it, or give these more memory"
            )
        self.referenced_blocks = Counter[int]()
        self._waits: dict[str, _Wait] = {}  # by request id
        self._num_running = 0
        self._ended: Queue[tuple[Transfer, Future[Any], float]] = Queue()  # with the time of the end
        # each element: the key of a block, or the keys of all blocks of a chunk
        self._unsaved: deque[list[BlockKey]] = deque()
        self._saving, self._loading = set[BlockKey](), set[BlockKey]()
        self._waiters: list[Future[Any]] = []
        self._num_saves = self.num_resets = self._num_saving = 0  # the last one counts blocks
        self._generation = b""  # the beginning of all keys in the tiers; `forget_tiers` changes it
        # seconds to compute a token (0: unknown); the time at which a slow tier is tried again
        self._token_seconds = self._next_probe = 0.0
        self.ended_at = 0.0  # when the call ended for which a transfer was waiting
        self.counts = TransferCounts()
        self._kept = KeptBlocks(kv_cache)
        self._touches = KVTouches(config, self._pool, setup.calls, self, self._save_again)
        self._fetches = KVFetches(self._kept, setup.calls, self, self._per_chunk)

    @property
    def is_busy(self) -> bool:
        return bool(self._waits)

    @property
    def is_running(self) -> bool:
        return self._num_running > 0

    def awaits(self, request: Request) -> bool:
        return request.request_id in self._waits

    def take_counts(self) -> TransferCounts:
        counts, self.counts = self.counts, TransferCounts()
        return counts

    # -- the transfers' life -------------------------------------------------------------------------------------------

    def _start(self, transfer: Transfer) -> None:
        self._num_running += 1
        self._advance(transfer, None, 0.0)

    def _advance(self, transfer: Transfer, ended: Future[Any] | None, ended_at: float) -> None:
        """Run the transfer until it waits for the next call. A step may have run since `ended_at`, for seconds."""
        self.ended_at = ended_at
        try:
            if ended is None:
                future = next(transfer)
            elif (error := ended.exception()) is not None:
                future = transfer.throw(error)
            else:
                future = transfer.send(ended.result())
        except (StopIteration, EngineError):  # it has come to its end, or a rank was lost, or an epoch has begun
            self._num_running -= 1
        else:
            future.add_done_callback(lambda done: self._note_call_end(transfer, done))

    def _note_call_end(self, transfer: Transfer, done: Future[Any]) -> None:
        self._ended.put((transfer, done, time.monotonic()))
        self._on_news()

    def settle(self) -> None:
        while self._ended.queue:  # without its lock: this is asked in each plan
            self._advance(*self._ended.get())
        if self._waits:
            now = time.monotonic()
            for wait in [wait for wait in self._waits.values() if now >= wait.deadline]:
                self.counts.num_late += 1
                self._let_go(wait.request)

    def wait(self, seconds: float) -> None:
        try:
            self._ended.put(self._ended.get(timeout=seconds))
        except Empty:
            return

    def forget(self, request: Request) -> None:
        self._waits.pop(request.request_id, None)

    def reset(self, *, with_host_pool: bool) -> None:
        self.num_resets += 1
        self._unsaved.clear()
        if with_host_pool:
            self.host_pool.forget_all()

    def forget_tiers(self) -> None:
        self.num_resets += 1
        self._generation = time.time_ns().to_bytes(8, "little")

    def _let_go(self, request: Request) -> None:
        if self._waits.pop(request.request_id, None) is not None:
            self._listener.record_brought(request)

    def find_near(self, key: BlockKey) -> int | None:
        """Returns None if neither arena nor host pool has the block. Otherwise the number has no meaning."""
        block_id = self._pool.lookup(key)
        return self.host_pool.lookup(key) if block_id is None else block_id

    def record_fetched(self, keys: Sequence[BlockKey]) -> None:
        self._touches.record_fetched(keys)

    def _tell_use(self, blocks: RequestBlocks, num_blocks: int) -> None:
        """A request goes on after so many blocks, which are near."""
        if due := self._touches.due(self._kept.objects(blocks, num_blocks, self._per_chunk)):
            self._start(self._touches.tell(due))

    def wire_keys(self, keys: Sequence[BlockKey]) -> list[bytes]:
        return [self._generation + name + group.to_bytes(2, "little") for name, group in keys]

    # -- in ------------------------------------------------------------------------------------------------------------

    def begin(self, request: Request, last: int) -> bool:
        if not self._config.loads:
            return False
        blocks, size, is_new = request.blocks, self._kv_cache.block_size, request.num_cached_tokens < 0
        limit = self._kv_cache.name_blocks(blocks, request.token_ids[: last + 1])
        local = self._kv_cache.longest_hit(blocks, limit, self._pool.lookup)
        limit = max(local, _first_blocks(limit, request.sampling.params.max_load_tokens, size))
        near = self._kv_cache.longest_hit(blocks, limit, self.find_near)
        needed = self._kept.needed_keys(blocks, near)
        # The host pool evicts its copies of these blocks later. A request that comes back after a preemption is no new use.
        self.host_pool.refresh([slot for key in needed if is_new and (slot := self.host_pool.lookup(key)) is not None])
        if is_new:
            self._tell_use(blocks, near)
        missing = [key for key in needed if self._pool.lookup(key) is None]
        if missing and not self._loading and not self._has_room(needed, len(missing)):
            return False  # running requests hold the blocks: this one is not admitted now, and comes here again
        blocks.were_sought = True
        self.counts.num_queried_tokens += (limit - local) * size
        is_far, now = bool(self._config.tiers) and near < limit, time.monotonic()
        seconds = self._seconds_to_wait((limit - near) * size) if is_far else 0.0
        if is_far and not seconds and now >= self._next_probe:
            self._next_probe = now + PROBE_SECONDS
            self._start(self._fetches.fetch(request.blocks, limit, near))  # while the request computes
        if not (missing or seconds):
            return False
        # a load from the host pool is fast, but may have to wait for other copies
        load_seconds = max(UNKNOWN_WAIT_SECONDS, (near - local) * size * self._token_seconds) if missing else 0.0
        self._waits[request.request_id] = _Wait(request, now + (load_seconds or seconds), seconds)
        self._start(self._bring(request, limit, near if seconds else limit, local))
        return self.awaits(request)

    def _seconds_to_wait(self, num_tokens: int) -> float:
        """How long a request waits for tokens from the tiers. 0: it does not wait, because computing them is faster."""
        compute = num_tokens * self._token_seconds
        fetch = num_tokens / self._kv_cache.block_size * self._fetches.block_seconds
        if not compute:
            return UNKNOWN_WAIT_SECONDS
        if fetch < compute:
            return max(MIN_WAIT_SHARE * compute, min(1.5 * fetch, MAX_WAIT_SHARE * compute))
        return 0.0

    def end_step(self, num_tokens: int, num_rows: int, seconds: float) -> None:
        if self._unsaved:
            self._save_committed()
        if num_tokens >= 8 * num_rows and seconds > 0:  # most of the step's tokens are of prompts
            self._token_seconds = smooth(self._token_seconds, seconds / num_tokens)

    def _bring(self, request: Request, limit: int, first: int, local: int) -> Transfer:
        """Load what the host pool has, fetch blocks [first, limit), and load these. The arena already has the first `local`
        blocks of the request."""
        wait = self._waits[request.request_id]
        try:
            yield from self._load(request, limit, local)
            if first < limit:
                wait.deadline = time.monotonic() + wait.fetch_seconds
                yield from self._fetches.fetch(request.blocks, limit, first)
                self._tell_use(request.blocks, self._kv_cache.longest_hit(request.blocks, limit, self.find_near))
                yield from self._load(request, limit, first)
        finally:
            if self._waits.get(request.request_id) is wait:  # after a preemption it may wait for another
                self._let_go(request)

    def _load(self, request: Request, limit: int, local: int) -> Transfer:
        blocks, lookup = request.blocks, self._pool.lookup
        while True:
            num_hit = self._kv_cache.longest_hit(blocks, limit, self.find_near)
            needed = self._kept.needed_keys(blocks, num_hit)
            keys = [key for key in needed if lookup(key) is None]
            if not keys or not self.awaits(request):
                return
            if self._loading.isdisjoint(keys) and self._has_room(needed, len(keys)):
                break
            if not self._loading:
                return
            yield self.end_of_another()
        kept = [block_id for key in needed if (block_id := lookup(key)) is not None]
        slots = [slot for key in keys if (slot := self.host_pool.lookup(key)) is not None]
        self.host_pool.touch(slots)
        self._pool.touch(kept)
        new, start, num_resets = self._pool.allocate(len(keys)), time.monotonic(), self.num_resets
        self._loading.update(keys)
        self.referenced_blocks.update(kept + new)
        try:
            if not all((yield self._calls.load(slots, new))):
                self.counts.num_failed += 1
                if self._config.fails_if_not_loaded and self.awaits(request):
                    reason = "its saved KV blocks could not be loaded (kv_load_failure_policy='fail'); send it again"
                    self._listener.fail(request.request_id, reason, ErrorKind.ENGINE)
            elif num_resets == self.num_resets:
                for key, block_id in zip(keys, new, strict=True):
                    self._pool.register(block_id, key)
                self._kv_cache.record_loaded(blocks, num_hit, request.token_ids)
                self.counts.num_hit_tokens += max(0, num_hit - local) * self._kv_cache.block_size
                self.counts.num_loaded_blocks += len(new)
                self.counts.load_bytes += len(new) * self._block_bytes
                self.counts.load_seconds += self.ended_at - start
        finally:
            self._loading.difference_update(keys)
            self._free_blocks(kept + new)
            self.host_pool.free(reversed(slots))
            self.wake_others()

    def end_of_another(self) -> Future[Any]:
        """Returns a future that ends when the load or the fetch of another transfer has ended."""
        self._waiters.append(Future())
        return self._waiters[-1]

    def wake_others(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.set_result([])

    def _has_room(self, needed: Sequence[BlockKey], count: int) -> bool:
        """Whether `count` blocks can be loaded now, so that the blocks of `needed` that are in the arena are not evicted."""
        present = [block_id for key in needed if (block_id := self._pool.lookup(key)) is not None]
        free = self._pool.num_free_blocks - self._pool.count_free(present)
        return count <= free and (not self._loading or len(self._loading) + count <= self._share)

    def _free_blocks(self, block_ids: Sequence[int]) -> None:
        self._pool.free(reversed(block_ids))
        self.referenced_blocks.subtract(block_ids)

    # -- out -----------------------------------------------------------------------------------------------------------

    def record_committed(self, request: Request, first: int) -> None:
        self._record_unsaved(request, first, is_released=False)

    def record_release(self, request: Request, *, has_last_state: bool) -> None:
        num_committed = request.blocks.num_committed
        num_last = self._kept.num_last if has_last_state else 0
        self._record_unsaved(request, max(0, num_committed - num_last), is_released=True)

    def _record_unsaved(self, request: Request, first: int, *, is_released: bool) -> None:
        """Note which blocks from number `first` on are to be saved. A chunk is saved when its last block is committed. Blocks
        behind the last whole chunk are saved when the request gives them up, each one alone."""
        blocks, size, per_chunk = request.blocks, self._kv_cache.block_size, self._per_chunk
        stop = _first_blocks(blocks.num_committed, request.sampling.params.max_offload_tokens, size)
        if self._config.offload_prompt_only:
            stop = min(stop, request.num_prompt_tokens // size)
        stop = min(stop, len(blocks.hashes))  # blocks that are shared with a leader may have no names yet
        if self._config.saves and blocks.may_be_named:
            for index in range(min(first, stop - stop % per_chunk) if is_released else first, stop):
                is_last = (index + 1) % per_chunk == 0
                for key, is_whole in self._kept.keys_at(blocks, index):
                    names = blocks.hashes[index + 1 - per_chunk : index + 1] if is_whole and is_last else [key[0]]
                    if (is_last or is_released or not is_whole) and self._pool.lookup(key) is not None:
                        self._unsaved.append([(name, key[1]) for name in names])

    def _save_again(self, keys: list[BlockKey]) -> None:
        self._unsaved.append(keys)

    def _save_committed(self) -> None:
        """Begin to save committed blocks. Blocks for which there is no room now wait; they are skipped if they are evicted
        meanwhile, or if more entries wait than the arena has blocks. Each entry is looked at once, however many wait."""
        found, block_ids, most = list[list[BlockKey]](), list[int](), self._pool.num_blocks
        room = min(self._share - self._num_saving, self.host_pool.num_free_blocks // 2)
        while self._unsaved and (len(block_ids) + len(self._unsaved[0]) <= room or len(self._unsaved) > most):
            keys = self._unsaved.popleft()
            if all(key in self._saving or self.host_pool.lookup(key) is not None for key in keys):
                continue
            there = {key: block_id for key in keys if (block_id := self._pool.lookup(key)) is not None}
            if len(there) > room - len(block_ids):
                there.clear()  # too many wait for room
            found += [keys] if len(there) == len(keys) else [[key] for key in there]
            block_ids += there.values()
            self._saving.update(there)
            self.counts.num_skipped_saves += len(keys) - len(there)
        if found:
            self._start(self._save(found, block_ids))

    def _save(self, objects: Sequence[Sequence[BlockKey]], block_ids: Sequence[int]) -> Transfer:
        keys = [key for each in objects for key in each]
        self._pool.touch(block_ids)
        self.referenced_blocks.update(block_ids)
        self._num_saving += len(block_ids)
        slots, num_resets = self.host_pool.allocate(len(keys)), self.num_resets
        self._num_saves += 1
        transfer_id, start = self._num_saves, time.monotonic()
        try:
            try:
                names = [self.wire_keys(each) for each in objects] if self._config.tiers else []
                is_saved = all((yield self._calls.save(transfer_id, block_ids, slots, names)))
                if is_saved and num_resets == self.num_resets:
                    for key, slot in zip(keys, slots, strict=True):
                        self.host_pool.register(slot, key)
                    self._touches.note(keys)
                    self.counts.num_saved_blocks += len(keys)
                    self.counts.save_bytes += len(keys) * self._block_bytes
                    self.counts.save_seconds += self.ended_at - start
                self.counts.num_failed += not is_saved
            finally:
                self._num_saving -= len(block_ids)
                self._free_blocks(block_ids)
                self._saving.difference_update(keys)
            if self._unsaved:
                self._save_committed()
            if self._config.tiers:
                answers = yield self._calls.stored(transfer_id)
                self.counts.add_tiers(answer[1] for answer in answers)
                self.counts.num_skipped_saves += 0 if all(answer[0] for answer in answers) else len(keys)
        finally:
            self.host_pool.free(reversed(slots))
        if self._unsaved:
            self._save_committed()  # the slots may be evicted now, so a chunk that waits may fit

    # -- for tests -----------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        if not self._num_running:
            assert not (self._loading or self._num_saving or self._saving or self._fetches.running)
            assert not (self._waits or self._waiters)
            assert not any(self.referenced_blocks.values())
            self.host_pool.check_integrity({})


def _first_blocks(num_blocks: int, max_tokens: int | None, block_size: int) -> int:
    if max_tokens is None:
        return num_blocks
    return min(num_blocks, max_tokens // block_size)
