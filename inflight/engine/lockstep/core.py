"""`LockstepCore`: an engine core whose replica divides the experts of a mixture with other replicas.

In each layer with experts, a step waits for the same step of all replicas. So all replicas run the same steps:

    replica 0   | plan 1, tell | step 1, 40 rows | step 2, 41 rows | ...
    replica 1   | hear of 1    | step 1, no rows | plan 2 | step 2, 3 rows | ...

A core that plans a step tells the other cores its number, and submits it without waiting for them. A core that hears of a step
and has nothing to compute submits it without rows. Each core submits the steps in order, and each rank runs them in order. So a
step waits only for steps of other replicas that were submitted, or will be without waiting for this one: nothing waits in a
circle.

A fault in one replica ends the epoch of the whole group (group.py). Each core then voids its steps, lets its ranks begin a new
epoch of their own (executor/recovery.py), and they meet the ranks of the other replicas again.
"""

import hashlib
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from inflight.config.engine import EngineConfig
from inflight.engine.core.engine_core import EngineCore
from inflight.engine.core.step_loop import IDLE_SECONDS, CoreListener
from inflight.engine.lockstep.group import LockstepGroup, Phase
from inflight.engine.lockstep.links import LockstepLinks
from inflight.errors import RankError, WorkerDiedError
from inflight.executor.executor import Executor
from inflight.interface.expert_counts import ExpertCounts
from inflight.interface.kv_cache import KVCacheConfig
from inflight.interface.request import EngineCoreOutput
from inflight.interface.statistics import SchedulerStats
from inflight.interface.step import SchedulerOutput
from inflight.kv_cache.manager import KVCacheManager
from inflight.scheduler.scheduler import Scheduler
from inflight.structured_output.manager import StructuredOutputManager

logger = logging.getLogger(__name__)

LISTEN_SECONDS = 60.0  # opening a socket takes no time, but the machine may be busy
COUNT_SECONDS = 1.0  # between two questions to a rank about its experts


class LockstepCore(EngineCore):
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
        super().__init__(config, executor, scheduler, kv_cache, kv_cache_config, grammars, listener)
        self._secret = config.parallel.lockstep_secret
        place = config.parallel.replica_index, len(config.parallel.replicas)
        self._links = self._open_links(*place)
        self._group = LockstepGroup(*place, self._links.send)
        self._num_submitted = 0  # steps of this epoch of the group
        self._joining: Future[list[None]] | None = None
        self._waits_since: float | None = None  # since when requests have waited for other replicas
        self._counting: Future[Sequence[int] | None] | None = None  # the last question to a rank about its experts
        self._count_at = 0.0  # when the next question is asked, on the clock time.monotonic()
        try:
            self._meet()
        except BaseException:
            self._links.close()
            raise

    def _open_links(self, replica: int, num_replicas: int) -> LockstepLinks:
        return LockstepLinks(replica, num_replicas, self._secret, self._listener.wake)

    # -- what the owner of the core calls --------------------------------------------------------------------------------

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do, for requests of this replica or of others."""
        self._take_news()
        has_work = super().has_unfinished_requests() or bool(self._in_flight)
        return has_work or self._lags or (not self._group.is_closing and self._must_advance())

    def step(self) -> list[EngineCoreOutput]:
        """As `StepLoop.step`. While the replicas have not met, there is no step to run."""
        self.check_alive()
        if self._advance():
            return super().step()
        outputs, self._outputs = self._outputs + self.scheduler.take_failures(), []
        self._records.record_idleness()
        if not outputs:
            self._links.wait(IDLE_SECONDS)
        return outputs

    def take_stats(self) -> SchedulerStats:
        return replace(super().take_stats(), experts=self._take_expert_counts())

    def _take_expert_counts(self) -> ExpertCounts | None:
        """What a rank has answered, if it has. Asks again from time to time."""
        counts, asked = None, self._counting
        if asked is not None and asked.done():
            self._counting = None
            if asked.exception() is None and (numbers := asked.result()) is not None:
                counts = ExpertCounts(*numbers)
        if self._counting is None and self._group.phase is Phase.RUNNING and time.monotonic() >= self._count_at:
            self._count_at = time.monotonic() + COUNT_SECONDS
            self._counting = self._executor.collective_rpc(
                "take_expert_counts", non_block=True, unique_reply_rank=0, beside=True
            )
        return counts

    def close(self) -> None:
        self._group.say_goodbye()
        self._links.close()
        super().close()

    # -- the epochs of the group -----------------------------------------------------------------------------------------

    def _take_news(self) -> None:
        for peer, message in self._links.take_news():
            match message:
                case "came":
                    self._group.link_came(peer)
                case "lost":
                    self._group.link_lost(peer)
                case _:
                    self._group.take(peer, message)

    @property
    def _lags(self) -> bool:
        return self._group.phase is Phase.RUNNING and self._num_submitted < self._group.target

    def _must_advance(self) -> bool:
        group, joining = self._group, self._joining
        return group.phase is Phase.OVER or group.can_join or (joining is not None and joining.done())

    def _advance(self) -> bool:
        """Do what brings the next epoch of the group. Returns whether steps may run. Waits for the ranks of this core only.

        Raises:
            EngineError: the core is dead.
        """
        self._take_news()
        group = self._group
        if self._joining is not None and self._joining.done():
            self._end_join(self._joining)
        if group.phase is Phase.OVER:
            self._begin_again()
        if group.can_join:
            self._join()
        if group.phase is Phase.MEETING and self.scheduler.has_unfinished_requests():
            self._check_patience()
        return group.phase is Phase.RUNNING

    def _begin_again(self) -> None:
        """Another replica has ended the epoch."""
        cause = WorkerDiedError(self._group.reason, rank=0, is_echo=True)
        self._in_flight.clear()
        for step_id, empty in self.scheduler.void():
            self._executor.provide_grammar_output(step_id, empty)
        if not self._fault_tolerance.enabled:
            self._death = cause
        if self._death is not None or not self._recover(cause, ()):
            raise cause

    def _log_fault(self, cause: Exception, plans: Sequence[SchedulerOutput], state: str) -> None:
        """The replica in which the fault was logs all of it."""
        if isinstance(cause, RankError) and cause.is_echo:
            logger.warning("the steps in flight are void: %s", str(cause).splitlines()[0])
        else:
            super()._log_fault(cause, plans, state)

    def _recover(self, cause: RankError, plans: Sequence[SchedulerOutput]) -> bool:
        """As `EngineCore._recover`, for the part of the group that is here. Requests are not to blame for what happened in
        another replica."""
        self._joining = None  # the ranks drop it
        while True:
            self._group.leave(str(cause).splitlines()[0])
            if not super()._recover(cause, () if cause.is_echo else plans):
                return False
            try:
                self._meet()
            except RankError as error:
                cause = error
                plans = ()
            else:
                return True

    def _meet(self) -> None:
        """Let the ranks of this core listen for the others.

        Raises:
            EngineError: a rank was lost.
        """
        addresses = self._executor.collective_rpc("listen_for_experts", timeout=LISTEN_SECONDS)
        self._group.begin([(host, port) for host, port in addresses])

    def _join(self) -> None:
        addresses = self._group.join()
        logger.debug("the ranks of all replicas meet in epoch %d of the group", self._group.epoch)
        token = hashlib.sha256(f"epoch {self._group.epoch} {self._secret}".encode()).digest()
        self._joining = self._executor.collective_rpc("join_experts", (token, addresses), non_block=True)
        self._joining.add_done_callback(lambda _: self._listener.wake())

    def _end_join(self, joining: Future[list[None]]) -> None:
        self._joining = None
        if self._group.phase is not Phase.JOINING:
            return  # the epoch has ended meanwhile
        error = joining.exception()
        if error is None:
            self._group.run()
            self._num_submitted = 0
            self._waits_since = None
        else:
            self._group.leave(f"the ranks of the replicas could not meet: {str(error).splitlines()[0]}")

    def _check_patience(self) -> None:
        """
        Raises:
            RankError: another replica has not come back for too long, so the core is dead.
        """
        seconds = self._fault_tolerance.engine_recovery_timeout_sec
        if self._waits_since is None:
            self._waits_since = time.monotonic()
        if time.monotonic() > self._waits_since + seconds:
            missing = ", ".join(map(str, self._group.missing))
            text = f"replicas {missing}, which have some of the experts, did not come back within {seconds:g} s"
            self.is_in_vain = True
            self._death = WorkerDiedError(text, rank=0)
            raise self._death

    # -- steps -----------------------------------------------------------------------------------------------------------

    def _submit_steps(self) -> None:
        while len(self._in_flight) < self._depth:
            self._listener.before_plan()
            self._take_news()
            if self._group.phase is not Phase.RUNNING:
                return
            start = time.perf_counter_ns()
            plan = self.scheduler.schedule()
            if plan is not None:
                self._group.announce(self._num_submitted + 1)
            elif self._lags:
                plan = self.scheduler.plan_nothing()
            else:
                return
            self._num_submitted += 1
            self._records.worked(plan.step_id, "plan", start)
            future = self._executor.execute_model(plan, non_block=True)  # how long others need is not known here
            self._records.submitted(plan, future, start)
            self._in_flight.append((plan, future))
            self._send_masks()

    def _commit_oldest(self) -> None:
        plan, future = self._in_flight[0]
        if plan.request_ids:
            super()._commit_oldest()
            return
        with self.timeline.span(plan.step_id, "wait"):
            future.result()
        self._in_flight.popleft()
        self._send_masks()
