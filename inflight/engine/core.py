"""`EngineCore`: plans steps with the scheduler, runs them on the executor, and commits their results.

    step():   plan and submit until `depth` steps are in flight  ->  wait for the oldest  ->  commit it  ->  send masks
              ->  plan and submit again

Steps are committed in the order in which they were submitted. With depth 1, a step is planned when the step before it has been
committed. With depth 2, a step is planned and sent to the workers before the result of the step before it is known. A pipeline
has a larger depth, so that every stage has work. The masks of a step with grammars are sent after its plan, as soon as the
tokens before it have been committed. The forward pass of the step runs meanwhile.

If a step fails, all steps in flight are void: their results are not used, and their requests keep their tokens and wait again.
Whether the engine can continue depends on the failure:

    there is one rank, its step raised   yes, if the rank can compute a step without requests (`check_health`)
    one of several ranks raised          no: the rank has left its process groups, and no code makes new ones
    a step exceeded its time limit       no: the rank may still be running it
    a rank died                          no

If the engine cannot continue, the core is dead. It raises the cause once, and `EngineDeadError` in all later calls.
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
from inflight.engine.kv_cache_sizing import num_tokens_held
from inflight.engine.kv_cache_start import allocate_kv_cache
from inflight.engine.pipeline_tuning import tuned
from inflight.engine.step_records import StepRecords
from inflight.engine.step_time_start import measured_step_times
from inflight.errors import EngineDeadError, EngineError, RankError, StepError
from inflight.executor.executor import Executor
from inflight.interface.request import EngineCoreOutput, EngineCoreRequest
from inflight.interface.statistics import SchedulerStats
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.kv_cache.manager import KVCacheManager
from inflight.scheduler.scheduler import Scheduler
from inflight.structured_output.manager import StructuredOutputManager

logger = logging.getLogger(__name__)

# How long `step` waits for a grammar if there is nothing else to do. Requests that arrive in this time are planned after it.
IDLE_SECONDS = 0.01


class EngineCore:
    """Owns the executor: `close` shuts it down. Not thread-safe: only one thread may call its methods.

    Attributes:
        before_plan: called directly before each plan. It may add and abort requests. By default it does nothing.
        wait_for_arrival: called with the future of the oldest step while fewer than `depth` steps are in flight. It waits until
            the step is done and returns False, or until a request has arrived and was added, and returns True. After True,
            `step` plans again. If it is None, `step` only waits for the oldest step.
        scheduler_config: the user's configuration, with the stagger and the depth that were measured for the pipeline (see
            pipeline_tuning.py).
        timeline: when the engine planned, waited, committed and filled masks.
    """

    def __init__(
        self, config: EngineConfig, executor: Executor, grammars: StructuredOutputManager | None = None
    ) -> None:
        """`grammars` compiles the grammars of requests and makes their masks. The core closes it."""
        self._executor = executor
        self._grammars = grammars
        self.before_plan: Callable[[], None] = lambda: None
        self.wait_for_arrival: Callable[[Future[ModelRunnerOutput]], bool] | None = None
        self.kv_cache_config = allocate_kv_cache(config, executor)
        self.num_kv_cache_tokens = num_tokens_held(self.kv_cache_config)
        kv_cache = KVCacheManager(
            self.kv_cache_config,
            fingerprint=config.model.fingerprint,
            enable_prefix_caching=config.cache.enable_prefix_caching,
        )
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
        # external_launcher needs equal plans on all engines, although they compile a grammar in different times
        self._waits_for_grammars = config.parallel.distributed_executor_backend == "external_launcher"
        self._has_peers = config.parallel.world_size > 1
        self._death: RankError | None = None
        self._in_flight: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()
        self._outputs: list[EngineCoreOutput] = []  # committed, but not returned yet
        self._records = StepRecords(self.scheduler, kv_cache)
        self.timeline = self._records.timeline

    def add_request(self, request: EngineCoreRequest) -> None:
        self.scheduler.add_request(request)
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
        """Check whether a rank has died. Used while no step is in flight. Never waits.

        Raises:
            WorkerDiedError: a rank has died, so the core is dead.
        """
        try:
            self._executor.raise_if_lost()
        except RankError as error:
            self._death = error
            raise

    def step(self) -> list[EngineCoreOutput]:
        """Run the loop once, and return what the committed step added to requests. The list is empty if there was nothing to
        do, if the requests of the step have ended, or if grammars are still being compiled (`step` waits for them at most
        IDLE_SECONDS).

        Raises:
            EngineError: a step failed, and all steps in flight are void. The core keeps their requests, with all tokens
                returned so far. Unless the core `is_dead`, abort the requests or call `step` again.
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
        """Commit the steps in flight, whose outputs the next `step` returns. Then call `Executor.collective_rpc`. Without these
        commits the call could wait for ever: the ranks run it after the steps, and the steps may wait for masks that only the
        core sends.

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
            future = self._executor.execute_model(plan, non_block=True)
            self._records.submitted(plan.step_id, future, start)
            self._in_flight.append((plan, future))
            self._send_masks()

    def _plan_arrivals(self) -> None:
        """While more steps may be in flight, plan requests that arrive before the oldest step is done."""
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
        self._in_flight.popleft()  # not earlier, because an interrupt during the wait must not lose the step
        self._send_masks()

    def _send_masks(self) -> None:
        """Make and send the masks of those steps in flight for which all earlier tokens are committed."""
        start = time.perf_counter_ns()
        for step_id, grammar_output in self.scheduler.fill_masks():
            self._executor.provide_grammar_output(step_id, grammar_output)
            start = self._records.worked(step_id, "mask", start)

    @contextmanager
    def _voiding_on_error(self) -> Iterator[None]:
        """Void the steps in flight if the body of the `with` statement raises. If the rank can continue, and all requests of
        the failed step had already ended, the failure is only logged. Then the other steps are computed again."""
        self.check_alive()
        try:
            yield
        except Exception as error:
            is_harmless = isinstance(error, EngineError) and self.scheduler.is_oldest_step_dead()
            cause = self._void_steps(error)
            if isinstance(cause, RankError) and not self._can_go_on(cause):
                self._death = cause
            elif is_harmless:
                return
            if cause is error:
                raise
            raise cause from None

    def _void_steps(self, error: Exception) -> Exception:
        """Drop all steps in flight. Log the cause with the plan and the scheduler's state. Returns the cause."""
        plans = [plan for plan, _ in self._in_flight]
        state = self.scheduler.describe()
        self._in_flight.clear()
        for step_id, empty in self.scheduler.void():
            self._executor.provide_grammar_output(step_id, empty)
        # only after `provide_grammar_output`, because the step with the cause may have waited for these masks
        cause = self._executor.root_cause(error) if isinstance(error, RankError) and self._has_peers else error
        failed_id = cause.step_id if isinstance(cause, RankError) else None
        failed = [plan for plan in plans if plan.step_id == failed_id]
        logger.error(
            "%s\nThe plan was:\n%s\nThe scheduler's state:\n%s\nSteps in flight: %s",
            cause,
            "\n".join(plan.describe() for plan in failed or plans[:1]) or "none",
            state,
            ", ".join(str(plan.step_id) for plan in plans) or "none",
            exc_info=None if isinstance(cause, EngineError) else cause,  # other errors are defects of this process
        )
        return cause

    def _can_go_on(self, cause: RankError) -> bool:
        """Whether the rank can run more steps after this error. Waits for the steps that the rank still runs."""
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
