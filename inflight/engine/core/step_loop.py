"""`StepLoop`: plans steps with the scheduler, runs them on the executor, and commits their results.

    step():   plan and submit until `depth` steps are in flight  ->  wait for the oldest  ->  commit it  ->  send masks
              ->  plan and submit again

Steps are committed in the order in which they were submitted. With depth 1, a step is planned when the previous step has been
committed. With depth 2, a step is planned and sent to the workers before the result of the previous step is known. A pipeline
has a larger depth, so that every stage has work. If requests of a step have a grammar, a mask says which tokens each of them
may draw. The masks depend on all earlier tokens. So they are sent after the plan of the step, as soon as the earlier tokens are
committed. Meanwhile the forward pass of the step runs.

What happens after a fault is in engine_core.py: `EngineCore` is a `StepLoop` that recovers.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from inflight.engine.core.step_records import StepRecords
from inflight.errors import EngineDeadError, RankError
from inflight.executor.executor import Executor
from inflight.interface.request import EngineCoreOutput, EngineCoreRequest, Int32Array
from inflight.interface.statistics import FaultStatus, SchedulerStats
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.kv_cache.manager import KVCacheManager
from inflight.scheduler.scheduler import Scheduler

# How long `step` waits for a grammar if there is nothing else to do. Requests that arrive meanwhile are planned afterwards.
IDLE_SECONDS = 0.01

# A step may take BUDGET_FACTOR times its predicted time, but at least MIN_BUDGET_SECONDS, because a prediction can be wrong,
# for example if the machine is suddenly busy, or if a kernel must be compiled.
BUDGET_FACTOR = 20.0
MIN_BUDGET_SECONDS = 15.0


class CoreListener:
    """What an engine core calls while it runs. The methods of this base class do nothing. `may_add`: whether requests may come
    while a step runs. Then `wait_for_arrival` is called."""

    may_add = False

    def before_plan(self) -> None:
        """Called directly before each plan. It may add and abort requests."""

    def wait_for_arrival(self, step: Future[ModelRunnerOutput]) -> bool:
        """Wait until the oldest step is done, until a request has arrived, or until `wake` is called. If a request has arrived,
        add it. Return whether `step` is to plan again. Called while fewer than `depth` steps are in flight."""
        return False

    def faults_changed(self, status: FaultStatus) -> None:
        """A recovery of the ranks has begun or ended."""

    def wake(self) -> None:
        """A rank has died, or a transfer of KV blocks goes on. Called in any thread, and must not block. Then `EngineCore.step`
        is to be called, or `check_ranks` if there are no requests."""


class StepLoop:
    """Not thread-safe: only one thread may call its methods.

    Args:
        depth: how many steps may be in flight.
        waits_for_grammars: whether a new request waits until its grammar is compiled, because other engines must make the same
            plans, and may compile it earlier or later.

    Attributes:
        timeline: when the engine planned, waited, committed and filled masks, and when it was idle.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        kv_cache: KVCacheManager,
        listener: CoreListener,
        *,
        depth: int,
        waits_for_grammars: bool,
    ) -> None:
        self.scheduler = scheduler
        self._listener = listener
        self._executor = executor
        self._depth = depth
        self._waits_for_grammars = waits_for_grammars
        self._death: RankError | None = None
        self._in_flight: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()
        self._outputs: list[EngineCoreOutput] = []  # committed, but not returned yet
        self._records = StepRecords(scheduler, kv_cache)
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
        self._records.record_idleness()

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

    def step(self) -> list[EngineCoreOutput]:
        """Run the loop once, and return what the committed step added to requests. The list may be empty, for example if there
        was nothing to do, if the requests of the step have ended, or if grammars are still being compiled (`step` waits for
        them at most IDLE_SECONDS).

        Raises:
            EngineError: a step failed, and all steps in flight are void. The core keeps their requests, with all tokens
                returned so far. If `is_dead` is False, abort the requests or call `step` again. With fault tolerance, this
                error is raised only if the core is dead, or if this process itself has failed.
        """
        self.check_alive()
        try:
            self._submit_steps()
            if self._in_flight:
                self._plan_arrivals()
                self._commit_oldest()
                if self._depth > 1:  # with depth 1 the caller may abort requests before the next plan
                    self._submit_steps()  # now, because the caller may need long to process the outputs
            elif not self._outputs and not self.scheduler.has_failures:
                if self.scheduler.transfers.is_busy:
                    self.scheduler.transfers.wait(IDLE_SECONDS)
                else:
                    self.scheduler.wait_for_grammars(IDLE_SECONDS, for_all=False)
        except Exception as error:
            self._after_error(error)
        outputs, self._outputs = self._outputs + self.scheduler.take_failures(), []
        self._records.record_idleness()
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
        self.check_alive()
        try:
            while self._in_flight:
                self._commit_oldest()
        except Exception as error:
            self._after_error(error)
        values: list[Any] = self._executor.collective_rpc(method, args, kwargs, timeout=timeout)
        return values

    def take_stats(self) -> SchedulerStats:
        """Returns the present state, and the counts since the last call."""
        return self._records.take_stats()

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> None:
        """Empty the prefix cache in the arena. With `reset_connector` also forget what is in the host pool and in the tiers."""
        self.scheduler.reset_prefix_cache(reset_host_pool=reset_connector)
        if reset_connector:
            self.scheduler.transfers.forget_tiers()

    def _submit_steps(self) -> None:
        while len(self._in_flight) < self._depth:
            self._listener.before_plan()
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
        while self._listener.may_add and len(self._in_flight) < self._depth:
            with self.timeline.span(plan.step_id, "wait"):
                has_arrival = self._listener.wait_for_arrival(future)
            if not has_arrival:
                return
            self._submit_steps()

    def _commit_oldest(self) -> None:
        plan, future = self._in_flight[0]
        with self.timeline.span(plan.step_id, "wait"):
            output = future.result()
        start = time.perf_counter_ns()
        self._outputs += self.scheduler.update_from_output(plan, output)
        self._records.committed(plan.step_id, start, self.scheduler.limits.last_step, output)
        self._in_flight.popleft()  # not earlier: if an interrupt ends the wait, the step must still be in `_in_flight`
        self._send_masks()

    def _send_masks(self) -> None:
        """Make and send the masks of those steps in flight for which all earlier tokens are committed."""
        start = time.perf_counter_ns()
        for step_id, grammar_output in self.scheduler.fill_masks():
            self._executor.provide_grammar_output(step_id, grammar_output)
            start = self._records.worked(step_id, "mask", start)

    def _after_error(self, error: Exception) -> None:
        """Called when a step has failed: raise the error, or return if the loop may go on with the next step."""
        raise error
