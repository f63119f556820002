"""`Executor`: the ranks of one model replica (one `Worker` each), from their start to their end, and the steps that they run.

It does everything that is the same wherever the ranks run. A subclass only starts the ranks and sends them messages:

    execute_model, collective_rpc, ...: step_protocol.py
    begin_epoch, replace_rank, join_epoch: the steps of a recovery (recovery.py), which the engine core begins
    _rank_died(rank, reason) ──▶ futures fail

If the ranks are threads of this process, they get plans, arguments and results by reference. So nobody may change these.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Self

from inflight.config.engine import EngineConfig
from inflight.errors import EngineClosedError, RankError, StepError, WorkerDiedError
from inflight.executor.meeting import Meeting
from inflight.executor.selector import executor_class
from inflight.executor.step_protocol import StepProtocol
from inflight.interface.kv_cache import KVCacheConfig, KVCacheSpec
from inflight.interface.start_up import EpochCommand, EpochReply, JoinEpoch, Listening, Ready
from inflight.interface.worker import Rendezvous
from inflight.processes.object_end import call_in_forks, run_to_end
from inflight.processes.recovery_limits import RecoveryLimits

logger = logging.getLogger(__name__)

MAX_SHUTDOWN_SECONDS = 5.0  # or the time allowed for a step, if that is shorter
MAX_BROKEN_SHUTDOWN_SECONDS = 0.5  # used if a rank is lost or silent, because the others may wait for it for ever


class Executor(StepProtocol):
    """One model replica. Any thread may call any method. A future's callback must not make a blocking call.

    Every method that sends something to the ranks raises these errors, or sets them in the future that it returns:
        StepError: the worker raised an exception. The error contains its traceback.
        StepTimeoutError: ranks did not reply in time. Their late replies are dropped.
        WorkerDiedError: a rank died before or during the call. After it every call raises it, until an epoch begins.
        EngineClosedError: `shutdown` was called before or during the call.

    The constructor of a concrete executor ends with a call of `_start()`, which returns when every rank has loaded its model.
    `after_waiting` constructs an executor whose ranks wait before they load it.

    Attributes:
        meeting: the beginning of the present epoch. For recovery.py and concrete executors.
        starting: the ranks that have not loaded their model yet. For recovery.py.
        limits: when ranks were replaced, and whether more may be.
    """

    can_recover = True  # False: no rank can be replaced
    _wait: Callable[[], None] | None = None  # called before the ranks are launched

    @staticmethod
    def get_class(config: EngineConfig) -> type[Executor]:
        """Returns the class that `config.parallel.distributed_executor_backend` names.

        Raises:
            ConfigError: the class cannot be imported, or it is not a subclass of `Executor`.
        """
        return executor_class(config.parallel.distributed_executor_backend, Executor)

    @classmethod
    def after_waiting(cls, config: EngineConfig, wait: Callable[[], None]) -> Self:
        """Construct an executor, but call `wait` before the ranks load the model. Meanwhile their libraries are imported."""
        executor = cls.__new__(cls)  # a subclass, also a user's one, need not know of `wait`
        executor._wait = wait
        cls.__init__(executor, config)
        return executor

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.limits = RecoveryLimits(config.fault_tolerance)
        self._num_stale = 0  # messages of older epochs: those that ranks have dropped, and late `EpochReply`s
        self.meeting = Meeting(self._table.epoch, self.world_size)
        self.starting: set[int] = set()
        self._shut_down = threading.Lock()  # the first call of `shutdown` acquires it and never releases it
        self._kv_cache_configs: list[KVCacheConfig] | None = None
        call_in_forks(self._disown)

    # -- start-up, in this order; each is idempotent -----------------------------------------------------------

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Returns for each rank: layer name -> spec."""
        specs: list[dict[str, KVCacheSpec]] = self.collective_rpc("get_kv_cache_specs")
        return specs

    def determine_available_memory(self) -> list[int]:
        """Returns for each rank how many bytes its KV cache can have, measured in a profile run."""
        num_bytes: list[int] = self.collective_rpc("determine_available_memory")
        return num_bytes

    def initialize_from_config(self, kv_cache_configs: Sequence[KVCacheConfig]) -> None:
        """Allocate the KV caches, one config per rank, and warm up. Does nothing if the configs are those of the last call."""
        configs = list(kv_cache_configs)
        assert len(configs) == self.world_size, f"{len(configs)} KV cache configs for {self.world_size} ranks"
        if configs == self._kv_cache_configs:
            return
        self._call("initialize_from_config", [(config,) for config in configs]).result()
        self._kv_cache_configs = configs

    # -- health and end ----------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Fail what is pending with `EngineClosedError`, then stop the ranks. Idempotent: a second call returns at once.

        It returns after a bounded time, whatever the ranks are doing.
        """
        if self._shut_down.acquire(blocking=False):
            self._table.close()
            self.meeting.close()
            self._terminate()

    def _disown(self) -> None:
        """In a forked process: the ranks and the streams to them belong to the parent, so `shutdown` must not touch them."""
        self._shut_down.acquire(blocking=False)

    # -- what a recovery uses (recovery.py) ------------------------------------------------------------------------------

    @property
    def longest_budget(self) -> float:
        """The most seconds that one of the steps in flight may take. 0.0 if no step is in flight."""
        return self._table.longest_budget

    @property
    def num_stale_frames(self) -> int:
        """How many messages of older epochs the executor and the ranks have dropped."""
        return self._table.num_stale + self._num_stale

    @property
    def num_spares(self) -> int:
        """How many processes wait to replace a rank."""
        return 0

    def begin_epoch(self, cause: RankError) -> set[int]:
        """Begin a new epoch, without the ranks. Returns the ranks that are known to be lost."""
        old = self.meeting
        self.meeting = Meeting(self._table.epoch + 1, self.world_size)  # first, so that no death is missed
        lost = {rank for rank, error in old.failed.items() if not (isinstance(error, RankError) and error.is_echo)}
        lost |= self._table.begin_epoch(cause)
        self._has_silent_rank = False
        self._raise_if_shut_down()
        return lost

    def _raise_if_shut_down(self) -> None:
        if self._shut_down.locked():
            self.meeting.close()
            raise EngineClosedError("the executor was shut down during a recovery")

    def send(self, rank: int, command: EpochCommand) -> None:
        with self._send_lock:
            self._send(rank, command)

    def replace_rank(self, rank: int) -> None:
        """End the rank if it lives, and start a new one, which takes part in the present epoch."""
        self._raise_if_shut_down()
        logger.warning("rank %d is replaced", rank)
        self._discard(rank)
        self.meeting.expect_again(rank)  # between the two calls, because nothing that the old rank does counts any more
        self._table.replaced(rank)
        self.starting.add(rank)
        self._start_again(rank)

    def join_epoch(self, deadline: float | None = None) -> None:
        """Let the ranks meet, when all of them listen. If there are KV caches, allocate those of new ranks.

        Raises:
            InflightError: a rank has failed.
            TimeoutError: the ranks were not ready before `deadline`, a time of `time.monotonic()`.
        """
        meeting = self.meeting
        rendezvous = self._rendezvous(meeting.wait_until_all_listen(deadline))
        for rank in range(self.world_size):
            self.send(rank, JoinEpoch(epoch=meeting.epoch, rendezvous=rendezvous))
        meeting.wait_until_all_are_ready(deadline)
        if self._kv_cache_configs is not None:
            seconds = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            configs = [(config,) for config in self._kv_cache_configs]
            try:
                self._call("initialize_from_config", configs, timeout=seconds).result()
            except StepError as error:
                meeting.fail(error.rank, error)
                raise

    # -- methods that a concrete executor implements -----------------------------------------------------------

    def _prepare(self) -> None:
        """Start what the ranks need to import their libraries. `_launch` follows, perhaps much later."""

    @abstractmethod
    def _launch(self) -> None:
        """Start every rank and wait until its worker is constructed and its model is loaded.

        Raises:
            InflightError: a rank raised it. If a rank raised an error of another kind, a `WorkerDiedError` with its traceback.
        """

    # Executors with `can_recover` implement these two methods.

    def _discard(self, rank: int) -> None:
        """End the rank if it lives, and from now on ignore what it sends. Waits until its process has ended."""
        raise NotImplementedError

    def _start_again(self, rank: int) -> None:
        """Start a new rank in place of a discarded one, with the epoch of `meeting`. Does not wait for it."""
        raise NotImplementedError

    def _rendezvous(self, addresses: tuple[tuple[str, int], ...]) -> Rendezvous | None:
        """Returns what the ranks need to meet in the epoch of `meeting`. `addresses`: where each rank listens."""
        return None

    @abstractmethod
    def _terminate(self) -> None:
        """Stop every rank that was started, even if `_launch` failed. Called once. Must return after a bounded time."""

    # -- methods that a concrete executor calls ----------------------------------------------------------------

    def _start(self) -> None:
        try:
            if self._wait is not None:
                self._prepare()
                self._wait()
            self._launch()
        except BaseException:  # also KeyboardInterrupt: if the constructor fails, no rank may stay alive
            run_to_end(self.shutdown)
            raise

    def _shutdown_deadline(self, *, is_broken: bool = False) -> float:
        """Returns until when `_terminate` waits for ranks to end by themselves, as a time of `time.monotonic()`."""
        seconds = MAX_BROKEN_SHUTDOWN_SECONDS if is_broken or self._has_silent_rank else MAX_SHUTDOWN_SECONDS
        return time.monotonic() + min(seconds, self._step_budget)

    def _take_epoch_reply(self, reply: EpochReply) -> None:
        if isinstance(reply, Ready):
            self.starting.discard(reply.rank)
        if reply.epoch != self.meeting.epoch:
            self._num_stale += 1
        else:
            if isinstance(reply, Listening):
                self._num_stale += reply.num_dropped
            self.meeting.take(reply)

    def _rank_died(self, rank: int, reason: str, kind: type[RankError] = WorkerDiedError) -> None:
        """Process the news that a rank is gone for good. May be called from any thread, and more than once."""
        self.meeting.fail(rank, kind(f"rank {rank} was lost ({reason})", rank=rank))
        self._table.rank_died(rank, reason, kind)
