"""`EngineCore`: the loop of steps (step_loop.py) that recovers from faults. start/make_core.py makes one.

If a step fails or a rank is lost, all steps in flight are void: their results are not used. Their requests keep the tokens
that were committed, and wait again. Then `recover` repairs the ranks (executor/recovery.py), and the requests go on. A
request whose steps fail again and again runs alone. If its step still fails, it ends with an error (scheduler/quarantine.py).
If the ranks cannot be repaired, the core is dead: it raises the cause once, and `EngineDeadError` in all later calls.

Without fault tolerance (`FaultToleranceConfig.enabled` is False) the core raises the error of a failed step. It can continue
only if there is one rank, the step raised an exception, and the rank can compute a step without requests (`check_health`).
"""

import logging
from collections.abc import Sequence

from inflight.config.engine import EngineConfig
from inflight.engine.core.fault_record import FaultRecord
from inflight.engine.core.step_loop import CoreListener, StepLoop
from inflight.errors import EngineError, ErrorKind, RankError, StepError
from inflight.executor.executor import Executor
from inflight.executor.recovery import recover
from inflight.interface.kv_cache import KVCacheConfig
from inflight.interface.statistics import FaultStatus
from inflight.interface.step import SchedulerOutput
from inflight.kv_cache.manager import KVCacheManager
from inflight.kv_cache.reported_names import ReportedNames
from inflight.processes.object_end import call_in_forks
from inflight.scheduler.scheduler import Scheduler
from inflight.structured_output.manager import StructuredOutputManager

logger = logging.getLogger(__name__)


class EngineCore(StepLoop):
    """Owns the executor: `close` shuts it down. Not thread-safe: only one thread may call its methods.

    Args:
        config: for a pipeline, it already has the stagger and the depth that start/pipeline_tuning.py has chosen.
        kv_cache_config: the cache of rank 0.
        grammars: compiles the grammars of requests and makes their masks. The core closes it.
        listener: who runs the core.

    Attributes:
        cached_names, block_events: the names and the tokens of blocks that have joined and left the prefix cache; None if
            nobody wants to know.
        is_closed: whether `close` was called, or the engine belongs to a process from which this one was forked.
        is_in_vain: whether the core is dead for a reason that another one in its place would have, too.
    """

    is_in_vain = False

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        scheduler: Scheduler,
        kv_cache: KVCacheManager,
        kv_cache_config: KVCacheConfig,
        grammars: StructuredOutputManager | None,
        listener: CoreListener,
    ) -> None:
        parallel = config.parallel
        super().__init__(
            executor,
            scheduler,
            kv_cache,
            listener,
            depth=config.scheduler.depth,
            waits_for_grammars=parallel.distributed_executor_backend == "external_launcher",
        )
        self.kv_cache_config = kv_cache_config
        self.scheduler_config = config.scheduler
        self.cached_names = ReportedNames(kv_cache) if parallel.routes_by_prefix else None
        self.block_events = kv_cache.watch_blocks() if config.cache.events is not None else None
        if config.cache.transfer is not None and self.cached_names is not None:
            for names in self.cached_names.names:
                names.add(scheduler.transfers.host_pool)  # a block of the host pool is nearly as good for a router
        self._grammars = grammars
        self._has_peers = parallel.world_size > 1
        self._fault_tolerance = config.fault_tolerance
        self._faults = FaultRecord()
        self.is_closed = False
        executor.set_death_callback(listener.wake)
        call_in_forks(self._disown)

    def check_ranks(self) -> None:
        """Check whether a rank was lost, and if so, replace it. Call this only while no step is in flight.

        Raises:
            RankError: a rank was lost and cannot be replaced, so the core is dead.
        """
        self.scheduler.transfers.settle()
        try:
            self._executor.raise_if_lost()
        except RankError as error:
            if not self._recover(error, ()):
                raise

    def fault_status(self) -> FaultStatus:
        """The recoveries since the start, and whether a recovery is under way."""
        return self._faults.status(self._executor, is_dead=self.is_dead)

    def _after_error(self, error: Exception) -> None:
        """Void the steps in flight and recover. Returns if the loop may go on.

        Without fault tolerance the error is raised again, with one exception: if the rank can continue, and all requests of
        the failed step had already ended, the failure is only logged. Then the requests of the other steps are computed again.
        """
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
            raise error
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
        self._log_fault(cause, plans, state)
        return cause

    def _log_fault(self, cause: Exception, plans: Sequence[SchedulerOutput], state: str) -> None:
        """Log the cause why the steps `plans` are void. `state`: of the scheduler."""
        logger.error(
            "%s\nThe plan was:\n%s\nThe scheduler's state:\n%s\nSteps in flight: %s",
            cause,
            "\n".join(plan.describe() for plan in _failed_plans(cause, plans)[:1]) or "none",
            state,
            ", ".join(str(plan.step_id) for plan in plans) or "none",
            exc_info=None if isinstance(cause, EngineError) else cause,  # other errors are defects of this process
        )

    def _recover(self, cause: RankError, plans: Sequence[SchedulerOutput]) -> bool:
        """Repair the ranks after the fault `cause`, which has made the steps `plans` void. If the repair fails, the core is
        dead, and the result is False."""
        self._faults.begin(cause)
        self._listener.faults_changed(self.fault_status())
        try:
            result = recover(self._executor, cause)
        except EngineError as error:
            if error is not cause:
                logger.error("the engine cannot recover: %s", error)
            self._death = cause
            self._listener.faults_changed(self.fault_status())
            return False
        if not result.kept_arenas:
            self.scheduler.reset_prefix_cache(reset_host_pool=True)
        summary = f"the engine failed: {str(cause).splitlines()[0]}"
        if self._fault_tolerance.resume_requests_after_recovery:
            failed = {request_id for plan in _failed_plans(cause, plans) for request_id in plan.request_ids}
            self.scheduler.blame(failed, summary)
        else:
            for request_id in {request_id for plan in plans for request_id in plan.request_ids}:
                self.scheduler.fail(request_id, summary, ErrorKind.ENGINE)
        self._faults.end(result, num_resumed=self.scheduler.num_begun)
        self._listener.faults_changed(self.fault_status())
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

    def _disown(self) -> None:
        """In a forked process: send nothing to the ranks, and do not wait for threads that exist only in the parent."""
        self.is_closed = True
        self._death = RankError("this process was forked, and the engine belongs to its parent", rank=0)
        self._grammars = None

    def close(self) -> None:
        """Shut down the executor and the threads that compile grammars. Idempotent."""
        self.is_closed = True
        self._executor.shutdown()
        if self._grammars is not None:
            self._grammars.close()


def _failed_plans(cause: Exception, plans: Sequence[SchedulerOutput]) -> Sequence[SchedulerOutput]:
    """Returns the plans of the steps that may have caused the error. If a step raised the error, the error names this step. If
    a rank died or hangs, any of the steps may be the cause."""
    failed = [plan for plan in plans if isinstance(cause, StepError) and plan.step_id == cause.step_id]
    return failed or plans
