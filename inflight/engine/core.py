"""`EngineCore`: one scheduler, one executor, and the loop between them.

    step():   plan and submit until `depth` steps are in flight  ->  wait for the oldest  ->  commit it

Everything that a step computes goes plan -> `Executor.execute_model(non_block=True)` -> commit, in step order. Depth 1 is
synchronous; with 2 the next step is planned, and in the workers' hands, before the result of this one is known; a pipeline
has more, so that every stage has one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future

from inflight.config.engine import EngineConfig
from inflight.executor.executor import Executor
from inflight.interface.request import EngineCoreOutput, EngineCoreRequest
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.kv_cache.manager import KVCacheManager
from inflight.kv_cache.sizing import make_kv_cache_configs
from inflight.scheduler.scheduler import Scheduler
from inflight.timeline import Timeline


class EngineCore:
    """Owns the executor: `close` shuts it down. Not thread-safe; one caller drives it."""

    def __init__(self, config: EngineConfig, executor: Executor, timeline: Timeline | None = None) -> None:
        self._executor = executor
        self.timeline = timeline or Timeline()
        specs = executor.get_kv_cache_specs()
        if config.cache.memory_bytes is not None:
            available = [config.cache.memory_bytes] * len(specs)
        else:
            available = executor.determine_available_memory()
        kv_cache_configs = make_kv_cache_configs(
            specs,
            available,
            max_model_len=config.model.max_model_len,
            max_step_tokens=config.scheduler.max_num_batched_tokens,
        )
        executor.initialize_from_config(kv_cache_configs)
        self.kv_cache_config = kv_cache_configs[0]
        kv_cache = KVCacheManager(
            self.kv_cache_config,
            fingerprint=config.model.fingerprint,
            enable_prefix_caching=config.cache.enable_prefix_caching,
        )
        self.scheduler = Scheduler(config.scheduler, kv_cache, max_model_len=config.model.max_model_len)
        self._depth = config.scheduler.depth
        self._in_flight: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()
        self._idle_since_ns: int | None = None  # there is no request; the next plan ends it
        self._note_idleness()

    def add_request(self, request: EngineCoreRequest) -> None:
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self.scheduler.abort_requests(request_ids)
        self._note_idleness()

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests() or bool(self._in_flight)

    def step(self) -> list[EngineCoreOutput]:
        """Run the loop once; returns what the committed step added. Empty when there is nothing to do, or all that it
        computed was for requests that have ended.

        Raises:
            EngineError: the oldest step failed. It and the younger ones in flight are void, whatever becomes of them in the
                workers: their requests are still there, with all tokens returned so far, to be aborted or tried again.
        """
        while len(self._in_flight) < self._depth:
            start = time.perf_counter_ns()
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self.timeline.record(plan.step_id, "plan", start, time.perf_counter_ns())
            if self._idle_since_ns is not None:
                self.timeline.record(plan.step_id, "idle", self._idle_since_ns, start)
                self._idle_since_ns = None
            self._in_flight.append((plan, self._executor.execute_model(plan, non_block=True)))
        if not self._in_flight:
            return []
        plan, future = self._in_flight[0]
        try:
            with self.timeline.span(plan.step_id, "wait"):
                output = future.result()
        except Exception:
            self._in_flight.clear()
            self.scheduler.void(plan)
            raise
        self._in_flight.popleft()  # only now: an interrupt while waiting must not lose the step
        with self.timeline.span(plan.step_id, "commit"):
            outputs = self.scheduler.update_from_output(plan, output)
        self._note_idleness()
        return outputs

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Shut the executor down. Idempotent."""
        self._executor.shutdown()

    def _note_idleness(self) -> None:
        """Devices that stand still from now to the next plan do not wait for the engine."""
        if self._idle_since_ns is None and not self.scheduler.has_unfinished_requests():
            self._idle_since_ns = time.perf_counter_ns()
