"""`EngineCore`: one scheduler, one executor, and the loop between them.

    step():   plan and submit until `depth` steps are in flight  ->  wait for the oldest  ->  commit it  ->  send masks
              ->  plan and submit again

Everything that a step computes goes plan -> `Executor.execute_model(non_block=True)` -> commit, in step order. Depth 1 is
synchronous; with 2 the next step is planned, and in the workers' hands, before the result of this one is known; a pipeline
has more, so that every stage has one. The masks of a step with grammars follow its plan, as soon as the tokens before it have
been committed: it runs meanwhile.

Who serves others while a step runs takes in what has come (new requests, aborts) in `before_plan`: it is in the very next plan.

A step that fails voids all steps in flight; their requests wait again with their tokens. Whether the engine can go on:

    one rank, its step raised            yes, if the rank can compute a step without requests (`check_health`)
    one of several ranks raised          no: it has left its process groups, and no code makes new ones
    a step took longer than its budget   no: the rank may still be running it
    a rank died                          no

With "no" the core is dead: it raises the cause once, and `EngineDeadError` from then on.
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
from inflight.engine.pipeline_tuning import tuned
from inflight.engine.step_clock import StepClock
from inflight.errors import EngineDeadError, EngineError, RankError, StepError
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
        wait_for_arrival: called in `step` with the oldest step while fewer are in flight than may be. It waits until that step
            is done, or until something has arrived that it has taken in, and says whether something has: then `step` plans
            again. None: what arrives waits for the step.
        scheduler_config: the configured one; if the start measured the pipeline, with the chosen stagger and depth.
    """

    def __init__(
        self, config: EngineConfig, executor: Executor, grammars: StructuredOutputManager | None = None
    ) -> None:
        """`grammars` serves requests with `structured_outputs`; the core closes it."""
        self._executor = executor
        self._grammars = grammars
        self.before_plan: Callable[[], None] = _nothing
        self.wait_for_arrival: Callable[[Future[ModelRunnerOutput]], bool] | None = None
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
        self.scheduler_config, first_step_id = tuned(config, executor, self.kv_cache_config)
        self.scheduler = Scheduler(
            self.scheduler_config,
            self._kv_cache,
            max_model_len=config.model.max_model_len,
            grammars=grammars,
            num_speculative_tokens=config.speculative.num_speculative_tokens if config.speculative is not None else 0,
            first_step_id=first_step_id,
        )
        self._depth = self.scheduler_config.depth
        # engines that must decide the same, each for itself, cannot go by when a grammar has been compiled
        self._waits_for_grammars = config.parallel.distributed_executor_backend == "external_launcher"
        self._has_peers = config.parallel.world_size > 1
        self._death: RankError | None = None
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

    @property
    def is_dead(self) -> bool:
        """Whether the core can run no more steps."""
        return self._death is not None

    def check_alive(self) -> None:
        """
        Raises:
            EngineDeadError: the core is dead; the message names the cause.
        """
        if self._death is not None:
            cause = str(self._death).split("\n", 1)[0]
            text = f"the engine has failed; make a new one. The cause: {cause}"
            raise EngineDeadError(text, summary=self._death.summary)

    def check_ranks(self) -> None:
        """Finds a dead rank while there are no requests, and so no step that would fail. Never waits.

        Raises:
            WorkerDiedError: a rank has died: the core is dead.
        """
        try:
            self._executor.raise_if_lost()
        except RankError as error:
            self._death = error
            raise

    def step(self) -> list[EngineCoreOutput]:
        """Run the loop once; returns what the committed step added. Empty when there is nothing to do, or all that it
        computed was for requests that have ended, or (after IDLE_SECONDS at most) grammars are still being compiled.

        Raises:
            EngineError: a step failed, and all steps in flight are void. Their requests are still there, with all tokens
                returned so far: unless the core `is_dead`, abort them, or call `step` again.
        """
        with self._voiding_on_error():
            self._submit_steps()
            if self._in_flight:
                self._plan_arrivals()
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
        values: list[Any] = self._executor.collective_rpc(method, args, kwargs, timeout=timeout)
        return values

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

    def _plan_arrivals(self) -> None:
        """Wait for the oldest step; while more may be in flight, what arrives is planned at once and does not wait for it."""
        plan, future = self._in_flight[0]
        while self.wait_for_arrival is not None and len(self._in_flight) < self._depth:
            with self.timeline.span(plan.step_id, "wait"):
                has_arrival = self.wait_for_arrival(future)
            if not has_arrival:
                return
            self._submit_steps()

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
        """Every failure of a part of a step is handled here. If all requests of the failed step had ended before, and the rank
        can go on, the failure is only logged, and the other steps are computed again."""
        self.check_alive()
        try:
            yield
        except Exception as error:
            is_left_over = isinstance(error, EngineError) and self.scheduler.is_oldest_step_dead()
            cause = self._void_steps(error)
            if isinstance(cause, RankError) and not self._can_go_on(cause):
                self._death = cause
            elif is_left_over:
                return
            if cause is error:
                raise
            raise cause from None

    def _void_steps(self, error: Exception) -> Exception:
        """Drop all steps in flight, and log why, with everything that was known. Returns the cause."""
        plans = [plan for plan, _ in self._in_flight]
        state = self.scheduler.describe()
        self._in_flight.clear()
        for step_id, empty in self.scheduler.void():
            self._executor.provide_grammar_output(step_id, empty)
        # `provide_grammar_output` comes first: the step with the cause may have waited for these masks
        cause = self._executor.root_cause(error) if isinstance(error, RankError) and self._has_peers else error
        failed_id = cause.step_id if isinstance(cause, RankError) else None
        failed = [plan for plan in plans if plan.step_id == failed_id]
        logger.error(
            "%s\nThe plan was:\n%s\nThe scheduler:\n%s\nSteps in flight: %s",
            cause,
            "\n".join(plan.describe() for plan in failed or plans[:1]) or "none",
            state,
            ", ".join(str(plan.step_id) for plan in plans) or "none",
            exc_info=None if isinstance(cause, EngineError) else cause,  # a defect of this process
        )
        return cause

    def _can_go_on(self, cause: RankError) -> bool:
        """Whether the ranks can run more steps after this error. Waits for the steps that they still run."""
        if self._has_peers or not isinstance(cause, StepError):
            return False
        try:
            self._executor.check_health()
        except EngineError as error:
            logger.error("the rank cannot go on: %s", error)
            return False
        return True

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
