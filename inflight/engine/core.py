"""`EngineCore`: one scheduler, one executor, and the loop between them.

    step():   plan and submit until `depth` steps are in flight  ->  wait for the oldest  ->  commit it  ->  send masks
              ->  plan and submit again

Everything that a step computes goes plan -> `Executor.execute_model(non_block=True)` -> commit, in step order. Depth 1 is
synchronous; with 2 the next step is planned, and in the workers' hands, before the result of this one is known; a pipeline
has more, so that every stage has one. The masks of a step with grammars follow its plan, as soon as the tokens before it have
been committed: it runs meanwhile.

Who serves others while a step runs takes in what has come (new requests, aborts) in `before_plan`: it is in the very next plan.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from inflight.config.engine import EngineConfig
from inflight.engine.step_clock import StepClock
from inflight.errors import EngineError, RankError
from inflight.executor.executor import Executor
from inflight.interface.request import EngineCoreOutput, EngineCoreRequest
from inflight.interface.statistics import SchedulerStats
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.kv_cache.manager import KVCacheManager
from inflight.kv_cache.sizing import describe_size, make_kv_cache_configs, num_tokens_held
from inflight.scheduler.added_tokens import StepCounters
from inflight.scheduler.scheduler import Scheduler
from inflight.structured_output.manager import StructuredOutputManager
from inflight.timeline import Timeline

logger = logging.getLogger(__name__)

IDLE_SECONDS = (
    0.01  # that a step waits for a grammar when there is nothing else to do; so long does an arrival wait then
)


class EngineCore:
    """Owns the executor: `close` shuts it down. Not thread-safe; one caller drives it.

    Attributes:
        before_plan: called in `step` right before each plan; it may add and abort requests. Does nothing by default.
    """

    def __init__(
        self, config: EngineConfig, executor: Executor, grammars: StructuredOutputManager | None = None
    ) -> None:
        """`grammars` serves requests with `structured_outputs`; the core closes it."""
        self._executor = executor
        self._grammars = grammars
        self.before_plan: Callable[[], None] = _nothing
        self.timeline = Timeline()
        self._clock = StepClock()
        self._newest_step = -1  # of those committed
        self._reported = StepCounters()
        start = time.perf_counter()
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
            is_measured=config.cache.memory_bytes is None,
            max_num_seqs=config.scheduler.max_num_seqs,
            usual_sequence_len=config.cache.usual_sequence_len,
        )
        sized = time.perf_counter()
        logger.info("%s", describe_size(kv_cache_configs[0], config.cache, config.scheduler))
        executor.initialize_from_config(kv_cache_configs)
        self.kv_cache_config = kv_cache_configs[0]
        self.num_kv_cache_tokens = num_tokens_held(self.kv_cache_config)
        logger.info("memory was measured in %.2f s", sized - start)
        logger.info("the KV cache was allocated, and a first step run, in %.2f s", time.perf_counter() - sized)
        self._kv_cache = KVCacheManager(
            self.kv_cache_config,
            fingerprint=config.model.fingerprint,
            enable_prefix_caching=config.cache.enable_prefix_caching,
        )
        self.scheduler = Scheduler(
            config.scheduler,
            self._kv_cache,
            max_model_len=config.model.max_model_len,
            grammars=grammars,
            num_speculative_tokens=config.speculative.num_speculative_tokens if config.speculative is not None else 0,
        )
        self._depth = config.scheduler.depth
        # engines that must decide the same, each for itself, cannot go by when a grammar has been compiled
        self._waits_for_grammars = config.parallel.distributed_executor_backend == "external_launcher"
        self._in_flight: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()
        self._outputs: list[EngineCoreOutput] = []  # committed, and not returned yet
        self._idle_since_ns: int | None = None  # there is no request; the next plan ends it
        self._note_idleness()

    def add_request(self, request: EngineCoreRequest) -> None:
        self.scheduler.add_request(request)
        if self._waits_for_grammars:
            self.scheduler.wait_for_grammars()

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests at once; nothing of them is returned any more. Ids that are unknown, or have ended, are passed over."""
        aborted = set(request_ids)
        self.scheduler.abort_requests(aborted)
        self._outputs = [output for output in self._outputs if output.request_id not in aborted]
        self._note_idleness()

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do, or to return."""
        return self.scheduler.has_unfinished_requests() or bool(self._in_flight or self._outputs)

    def step(self) -> list[EngineCoreOutput]:
        """Run the loop once; returns what the committed step added. Empty when there is nothing to do, or all that it
        computed was for requests that have ended, or (after IDLE_SECONDS at most) grammars are still being compiled.

        Raises:
            EngineError: a step failed. All steps in flight are void, whatever becomes of them in the workers: their requests
                are still there, with all tokens returned so far, to be aborted or tried again.
        """
        with self._voiding_on_error():
            self._submit_steps()
            if self._in_flight:
                self._commit_oldest()
                if self._depth > 1:  # before the caller takes its time with the outputs; with 1 he is to see them first
                    self._submit_steps()
            elif not self._outputs and not self.scheduler.has_failures:
                self.scheduler.wait_for_grammars(IDLE_SECONDS, for_all=False)
        outputs, self._outputs = self._outputs + self.scheduler.take_failures(), []
        self._note_idleness()
        return outputs

    def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),  # Any: the worker's method says what it takes and returns
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        """`Executor.collective_rpc`, when the steps in flight have been committed: some may wait for masks that only this loop
        sends. What they add is returned by the next `step`.

        Raises:
            EngineError: a step failed, as in `step`, or the call did.
        """
        with self._voiding_on_error():
            while self._in_flight:
                self._commit_oldest()
        return self._executor.collective_rpc(method, args, kwargs, timeout=timeout)

    def _submit_steps(self) -> None:
        while len(self._in_flight) < self._depth:
            self.before_plan()
            start = time.perf_counter_ns()
            plan = self.scheduler.schedule()
            if plan is None:
                break
            end = time.perf_counter_ns()
            self.timeline.record(plan.step_id, "plan", start, end)
            self._clock.worked(start, end)
            was_idle = self._idle_since_ns is not None
            if self._idle_since_ns is not None:
                self.timeline.record(plan.step_id, "idle", self._idle_since_ns, start)
                self._idle_since_ns = None
            future = self._executor.execute_model(plan, non_block=True)
            self._clock.submitted(future, after_idleness=was_idle)
            self._in_flight.append((plan, future))
            self._send_masks()

    def _commit_oldest(self) -> None:
        plan, future = self._in_flight[0]
        with self.timeline.span(plan.step_id, "wait"):
            output = future.result()
        start = time.perf_counter_ns()
        with self.timeline.span(plan.step_id, "commit"):
            self._outputs += self.scheduler.update_from_output(plan, output)
        self._clock.worked(start, time.perf_counter_ns())
        self._newest_step = plan.step_id
        self._in_flight.popleft()  # only now: an interrupt while waiting must not lose the step
        self._send_masks()

    def _send_masks(self) -> None:
        """Fill and send the masks of steps in flight that wait for no token any more."""
        start = time.perf_counter_ns()
        for step_id, grammar_output in self.scheduler.fill_masks():
            self._executor.provide_grammar_output(step_id, grammar_output)
            end = time.perf_counter_ns()
            self.timeline.record(step_id, "mask", start, end)
            self._clock.worked(start, end)
            start = end

    @contextmanager
    def _voiding_on_error(self) -> Iterator[None]:
        """Whatever part of a step fails: here is where all of them end. A failure of a step whose requests had all ended before
        is nobody's: it is logged, and the others are computed again."""
        try:
            yield
        except Exception as error:
            is_left_over = isinstance(error, EngineError) and self.scheduler.is_oldest_step_dead()
            self._void_steps(error)
            if not is_left_over:
                raise

    def _void_steps(self, error: Exception) -> None:
        """Log what failed, with everything that was known, and drop all steps in flight."""
        failed_id = error.step_id if isinstance(error, RankError) else None
        failed = [plan for plan, _ in self._in_flight if plan.step_id == failed_id]
        oldest = [plan for plan, _ in self._in_flight][:1]
        logger.error(
            "%s\nThe plan was:\n%s\nThe scheduler:\n%s\nSteps in flight: %s",
            error,
            "\n".join(plan.describe() for plan in failed or oldest) or "none",
            self.scheduler.describe(),
            ", ".join(str(plan.step_id) for plan, _ in self._in_flight) or "none",
            exc_info=not isinstance(error, EngineError),  # a defect of this process
        )
        self._in_flight.clear()
        for step_id, empty in self.scheduler.void():
            self._executor.provide_grammar_output(step_id, empty)

    def take_stats(self) -> SchedulerStats:
        """The state now, and what was counted since the last call."""
        scheduler, before = self.scheduler, self._reported
        self._reported = now = replace(scheduler.stats)
        gaps, hidden_share = self._clock.take()
        return SchedulerStats(
            step_id=self._newest_step,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            kv_cache_usage=self._kv_cache.usage,
            prefix_cache_queries=now.num_queried_tokens - before.num_queried_tokens,
            prefix_cache_hits=now.num_hit_tokens - before.num_hit_tokens,
            num_preemptions=now.num_preemptions - before.num_preemptions,
            step_gaps=gaps,
            hidden_share=hidden_share,
        )

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Shut the executor down, and end the threads that compile grammars. Idempotent."""
        self._executor.shutdown()
        if self._grammars is not None:
            self._grammars.close()

    def _note_idleness(self) -> None:
        """Devices that stand still from now to the next plan do not wait for the engine."""
        if self._idle_since_ns is None and not self.scheduler.has_unfinished_requests():
            self._idle_since_ns = time.perf_counter_ns()


def _nothing() -> None:
    """Nobody else has requests for the next plan."""
