"""`EngineCore`: plans steps with the scheduler, runs them on the executor, and commits their results.

    step():   plan and submit until `depth` steps are in flight  ->  wait for the oldest  ->  commit it  ->  send masks
              ->  plan and submit again

Steps are committed in the order in which they were submitted. With depth 1, a step is planned when the previous step has been
committed. With depth 2, a step is planned and sent to the workers before the result of the previous step is known. A pipeline
has a larger depth, so that every stage has work. If requests of a step have a grammar, a mask says which tokens each of them
may draw. The masks depend on all earlier tokens. So they are sent after the plan of the step, as soon as the earlier tokens are
committed. Meanwhile the forward pass of the step runs.

If a step fails or a rank is lost, all steps in flight are void: their results are not used. Their requests keep the tokens
that were committed, and wait again. Then `Executor.recover` repairs the ranks (executor/recovery.py), and the requests go on. A
request whose steps fail again and again runs alone. If its step still fails, it ends with an error (scheduler/suspects.py). If
the ranks cannot be repaired, the core is dead: it raises the cause once, and `EngineDeadError` in all later calls.

Without fault tolerance (`FaultToleranceConfig.enabled` is False) the core raises the error of a failed step. It can continue
only if there is one rank, the step raised an exception, and the rank can compute a step without requests (`check_health`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from inflight.config.engine import EngineConfig
from inflight.engine.fault_record import FaultRecord
from inflight.engine.kv_cache_sizing import num_tokens_held
from inflight.engine.kv_cache_start import allocate_kv_cache
from inflight.engine.pipeline_tuning import tuned
from inflight.engine.step_records import StepRecords
from inflight.engine.step_time_start import measured_step_times
from inflight.errors import EngineDeadError, EngineError, ErrorKind, RankError, StepError
from inflight.executor.executor import Executor
from inflight.interface.request import EngineCoreOutput, EngineCoreRequest, Int32Array
from inflight.interface.statistics import FaultStatus, SchedulerStats
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.kv_cache.manager import KVCacheManager
from inflight.scheduler.scheduler import Scheduler
from inflight.structured_output.manager import StructuredOutputManager

logger = logging.getLogger(__name__)

# How long `step` waits for a grammar if there is nothing else to do. Requests that arrive meanwhile are planned afterwards.
IDLE_SECONDS = 0.01

# A step may take BUDGET_FACTOR times its predicted time, but at least MIN_BUDGET_SECONDS, because a prediction can be wrong,
# for example if the machine is suddenly busy, or if a kernel must be compiled.
BUDGET_FACTOR = 20.0
MIN_BUDGET_SECONDS = 15.0


class EngineCore:
    """Owns the executor: `close` shuts it down. Not thread-safe: only one thread may call its methods.

    Attributes:
        before_plan: called directly before each plan. It may add and abort requests. By default it does nothing.
        wait_for_arrival: called with the future of the oldest step while fewer than `depth` steps are in flight. It waits until
            the step is done, or until a request has arrived. If a request has arrived, it adds the request and returns True,
            and `step` plans again. Otherwise it returns False. If None is set, `step` only waits for the oldest step.
        scheduler_config: the user's configuration. For a pipeline, its stagger and depth were chosen by a measurement (see
            pipeline_tuning.py).
        cached_names: the names of blocks that have joined and left the prefix cache; None if nobody wants to know.
        on_fault_status: called when a recovery of the ranks begins and when it ends. By default it does nothing.
        timeline: when the engine planned, waited, committed and filled masks, and when it was idle.
    """

    def __init__(
        self, config: EngineConfig, executor: Executor, grammars: StructuredOutputManager | None = None
    ) -> None:
        """`grammars` compiles the grammars of requests and makes their masks. The core closes it."""
        self._executor = executor
        self._grammars = grammars
        self.before_plan: Callable[[], None] = lambda: None
        self.wait_for_arrival: Callable[[Future[ModelRunnerOutput]], bool] | None = None
        self.on_fault_status: Callable[[FaultStatus], None] = lambda status: None
        self.kv_cache_config = allocate_kv_cache(config, executor)
        self.num_kv_cache_tokens = num_tokens_held(self.kv_cache_config)
        kv_cache = KVCacheManager(
            self.kv_cache_config,
            fingerprint=config.model.fingerprint,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            checkpoint_tokens=config.cache.state_checkpoint_tokens,
        )
        self.cached_names = kv_cache.watch_names() if config.parallel.routes_by_prefix else None
        self.scheduler_config, first_step_id = tuned(config, executor, self.kv_cache_config)
        step_times, first_step_id = measured_step_times(config, executor, self.kv_cache_config, first_step_id)
        self.scheduler = Scheduler(
            self.scheduler_config,
            kv_cache,
            max_model_len=config.model.max_model_len,
            grammars=grammars,
            num_speculative_tokens=config.speculative.num_speculative_tokens if config.speculative is not None else 0,
            first_step_id=first_step_id,
            step_times=step_times,
        )
        self._depth = self.scheduler_config.depth
        # With external_launcher all engines must make equal plans. One may compile a grammar later than another, so all wait.
        self._waits_for_grammars = config.parallel.distributed_executor_backend == "external_launcher"
        self._has_peers = config.parallel.world_size > 1
        self._fault_tolerance = config.fault_tolerance
        self._faults = FaultRecord()
        self._death: RankError | None = None
        self._in_flight: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()
        self._outputs: list[EngineCoreOutput] = []  # committed, but not returned yet
        self._records = StepRecords(self.scheduler, kv_cache)
        self.timeline = self._records.timeline

    def add_request(self, request: EngineCoreRequest, prompt_token_ids: Int32Array) -> None:
        self.scheduler.add_request(request, prompt_token_ids)
        if self._waits_for_grammars:
            self.scheduler.wait_for_grammars()

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests at once. `step` returns no more outputs of them. Ids of unknown or ended requests are ignored."""
        aborted = set(request_ids)
        self.scheduler.abort_requests(aborted)
        self._outputs = [output for output in self._outputs if output.request_id not in aborted]
        self._records.note_idleness()

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has a step to run, or an output to return."""
        return self.scheduler.has_unfinished_requests() or bool(self._in_flight or self._outputs)

    @property
    def is_dead(self) -> bool:
        """Whether the core can run no more steps."""
        return self._death is not None

    def check_alive(self) -> None:
        """
        Raises:
            EngineDeadError: the core is dead. The message contains the cause.
        """
        if self._death is not None:
            cause = str(self._death).split("\n", 1)[0]
            text = f"the engine has failed; make a new one. The cause: {cause}"
            raise EngineDeadError(text, summary=self._death.summary)

    def check_ranks(self) -> None:
        """Check whether a rank was lost, and if so, replace it. Call this only while no step is in flight.

        Raises:
            RankError: a rank was lost and cannot be replaced, so the core is dead.
        """
        try:
            self._executor.raise_if_lost()
        except RankError as error:
            if not self._recover(error, ()):
                raise

    def fault_status(self) -> FaultStatus:
        """The recoveries since the start, and whether a recovery is under way."""
        return self._faults.status(self._executor, is_dead=self.is_dead)

    def step(self) -> list[EngineCoreOutput]:
        """Run the loop once, and return what the committed step added to requests. The list may be empty, for example if there
        was nothing to do, if the requests of the step have ended, or if grammars are still being compiled (`step` waits for
        them at most IDLE_SECONDS).

        Raises:
            EngineError: a step failed, and all steps in flight are void. The core keeps their requests, with all tokens
                returned so far. If `is_dead` is False, abort the requests or call `step` again. With fault tolerance, this
                error is raised only if the core is dead, or if this process itself has failed.
        """
        with self._voiding_on_error():
            self._submit_steps()
            if self._in_flight:
                self._plan_arrivals()
                self._commit_oldest()
                if self._depth > 1:  # with depth 1 the caller may abort requests before the next plan
                    self._submit_steps()  # now, because the caller may need long to process the outputs
            elif not self._outputs and not self.scheduler.has_failures:
                self.scheduler.wait_for_grammars(IDLE_SECONDS, for_all=False)
        outputs, self._outputs = self._outputs + self.scheduler.take_failures(), []
        self._records.note_idleness()
        return outputs

    def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),  # Any: each method of the worker has its own arguments and result
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        """Commit the steps in flight, then call `Executor.collective_rpc`. The next `step` returns the outputs of these steps.
        Without the commits the call could wait for ever: the ranks run it after the steps, and the steps may wait for masks
        that only the core sends.

        Raises:
            EngineError: the call failed, or a step failed, as in `step`.
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
            self._records.worked(plan.step_id, "plan", start)
            budget = max(MIN_BUDGET_SECONDS, BUDGET_FACTOR * self.scheduler.limits.predicted_seconds)
            future = self._executor.execute_model(plan, non_block=True, budget=budget)
            self._records.submitted(plan, future, start)
            self._in_flight.append((plan, future))
            self._send_masks()

    def _plan_arrivals(self) -> None:
        """Until the oldest step is done or `depth` steps are in flight, plan requests when they arrive."""
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
        self._outputs += self.scheduler.update_from_output(plan, output)
        self._records.committed(plan.step_id, start, self.scheduler.limits.last_step)
        self._in_flight.popleft()  # not earlier: if an interrupt ends the wait, the step must still be in `_in_flight`
        self._send_masks()

    def _send_masks(self) -> None:
        """Make and send the masks of those steps in flight for which all earlier tokens are committed."""
        start = time.perf_counter_ns()
        for step_id, grammar_output in self.scheduler.fill_masks():
            self._executor.provide_grammar_output(step_id, grammar_output)
            start = self._records.worked(step_id, "mask", start)

    @contextmanager
    def _voiding_on_error(self) -> Iterator[None]:
        """If the body of the `with` statement raises, void the steps in flight and recover.

        Without fault tolerance the error is raised again, with one exception: if the rank can continue, and all requests of
        the failed step had already ended, the failure is only logged. Then the requests of the other steps are computed again.
        """
        self.check_alive()
        try:
            yield
        except Exception as error:
            is_harmless = isinstance(error, EngineError) and self.scheduler.is_oldest_step_dead()
            plans = [plan for plan, _ in self._in_flight]
            cause = self._void_steps(error)
            if isinstance(cause, RankError) and self._fault_tolerance.enabled:
                if self._recover(cause, plans):
                    return
            elif isinstance(cause, RankError) and not self._can_go_on(cause):
                self._death = cause
            elif is_harmless:
                return
            if cause is error:
                raise
            raise cause from None

    def _void_steps(self, error: Exception) -> Exception:
        """Drop all steps in flight. Log the cause of `error` with its plan and the scheduler's state. Returns the cause."""
        plans = [plan for plan, _ in self._in_flight]
        state = self.scheduler.describe()
        self._in_flight.clear()
        for step_id, empty in self.scheduler.void():
            self._executor.provide_grammar_output(step_id, empty)
        # only after `provide_grammar_output`, because a rank may fail only after it has got its masks
        cause = self._executor.root_cause(error) if isinstance(error, RankError) and self._has_peers else error
        logger.error(
            "%s\nThe plan was:\n%s\nThe scheduler's state:\n%s\nSteps in flight: %s",
            cause,
            "\n".join(plan.describe() for plan in _failed_plans(cause, plans)[:1]) or "none",
            state,
            ", ".join(str(plan.step_id) for plan in plans) or "none",
            exc_info=None if isinstance(cause, EngineError) else cause,  # other errors are defects of this process
        )
        return cause

    def _recover(self, cause: RankError, plans: Sequence[SchedulerOutput]) -> bool:
        """Repair the ranks after the fault `cause`, which has made the steps `plans` void. If the repair fails, the core is
        dead, and the result is False."""
        self._faults.begin(cause)
        self.on_fault_status(self.fault_status())
        try:
            result = self._executor.recover(cause)
        except EngineError as error:
            if error is not cause:
                logger.error("the engine cannot recover: %s", error)
            self._death = cause
            self.on_fault_status(self.fault_status())
            return False
        if not result.kept_arenas:
            self.scheduler.reset_prefix_cache()
        summary = f"the engine failed: {str(cause).splitlines()[0]}"
        if self._fault_tolerance.resume_requests_after_recovery:
            failed = {request_id for plan in _failed_plans(cause, plans) for request_id in plan.request_ids}
            self.scheduler.blame(failed, summary)
        else:
            for request_id in {request_id for plan in plans for request_id in plan.request_ids}:
                self.scheduler.fail(request_id, summary, ErrorKind.ENGINE)
        self._faults.end(result, num_resumed=self.scheduler.num_begun)
        self.on_fault_status(self.fault_status())
        return True

    def _can_go_on(self, cause: RankError) -> bool:
        """Whether the only rank can run more steps after this error. Waits for the steps that it still runs."""
        if self._has_peers or not isinstance(cause, StepError):
            return False
        try:
            self._executor.check_health()
        except EngineError as error:
            logger.error("the rank cannot run more steps: %s", error)
            return False
        return True

    def take_stats(self) -> SchedulerStats:
        """Returns the present state, and the counts since the last call."""
        return self._records.take_stats()

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Shut down the executor and the threads that compile grammars. Idempotent."""
        self._executor.shutdown()
        if self._grammars is not None:
            self._grammars.close()


def _failed_plans(cause: Exception, plans: Sequence[SchedulerOutput]) -> Sequence[SchedulerOutput]:
    """Returns the plans of the steps that may have caused the error. If a step raised the error, the error names this step. If
    a rank died or hangs, any of the steps may be the cause."""
    failed = [plan for plan in plans if isinstance(cause, StepError) and plan.step_id == cause.step_id]
    return failed or plans
