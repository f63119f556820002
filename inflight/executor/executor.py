"""`Executor`: drives one model replica, one `Worker` per rank. It implements the whole step protocol.

A concrete executor says only how ranks are launched and how a message reaches them:

    execute_model ── add to the ReplyTable ── _send(rank, command) ──▶ rank ──▶ _deliver(reply) ── ReplyTable ──▶ future
                                                                         ╰────▶ _rank_died(rank, reason) ──▶ futures fail

Order matters in two places. All ranks get the messages in the same order, whichever threads call: collectives on the ranks rely
on it. A message is in the table before it is sent, because its reply may come before `_send` returns.

If the ranks are threads of this process, plans, arguments and results pass by reference: they must not be changed.
"""

from __future__ import annotations

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Literal, overload

from inflight.config.engine import EngineConfig
from inflight.config.ranks import ranks_of_node
from inflight.errors import InflightError, RankError, StepTimeoutError
from inflight.executor.pending import PendingCall, PendingStep
from inflight.executor.reply_table import ReplyTable
from inflight.interface.kv_cache import KVCacheConfig, KVCacheSpec
from inflight.interface.messages import ExecuteModel, ProvideGrammarOutput, RpcCall, WorkerCommand, WorkerReply
from inflight.interface.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput

MAX_SHUTDOWN_SECONDS = 5.0  # or the budget of a step, if it is shorter
MAX_BROKEN_SHUTDOWN_SECONDS = 0.5  # if a rank is lost or silent: the others may wait for it for ever
ROOT_CAUSE_SECONDS = 0.5  # how long the engine waits, after the first error of a step, for the error that caused it


class Executor(ABC):
    """One model replica. Any thread may call any method; a future's callback must not make a blocking call.

    Every method that reaches the ranks raises, or sets in the future that it returns:
        StepError: the worker raised; the error holds its traceback.
        StepTimeoutError: ranks did not reply in time. Their late replies are dropped.
        WorkerDiedError: a rank died before or during the call.
        EngineClosedError: `shutdown` was called before or during the call.

    A concrete executor's constructor ends with `_start()`, and returns when every rank has loaded its model.
    """

    @staticmethod
    def get_class(config: EngineConfig) -> type[Executor]:
        """Returns the class for `config.parallel.distributed_executor_backend`.

        Raises:
            ConfigError: the backend names a class that cannot be imported, or that is no Executor.
        """
        from inflight.executor.selector import executor_class  # it imports this file

        return executor_class(config.parallel.distributed_executor_backend)

    def __init__(self, config: EngineConfig) -> None:
        parallel = config.parallel
        self.config = config
        self.world_size = parallel.world_size
        self.output_rank = parallel.world_size - parallel.tensor_parallel_size  # first TP rank of the last stage
        self._step_budget = config.execute_model_timeout_seconds
        self._table = ReplyTable(step_budget=self._step_budget, ask=self._ask, state=self._state)
        self._started: SimpleQueue[InflightError | None] = SimpleQueue()  # None: one more rank is ready
        self._has_silent_rank = False  # if True, other ranks may wait for it for ever
        self._call_ids = itertools.count()
        self._send_lock = threading.Lock()  # held while one message goes to all ranks
        self._shut_down = threading.Lock()  # taken once, by the first `shutdown`
        self._kv_cache_specs: list[dict[str, KVCacheSpec]] | None = None
        self._available_memory: list[int] | None = None
        self._kv_cache_configs: list[KVCacheConfig] | None = None

    @property
    def local_ranks(self) -> range:
        """The ranks on the engine's machine: their clock is the engine's."""
        return ranks_of_node(self.world_size, self.config.parallel.nnodes, 0)

    # -- start-up, in this order; each is idempotent -----------------------------------------------------------

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Returns for each rank: layer name -> spec."""
        if self._kv_cache_specs is None:
            self._kv_cache_specs = self.collective_rpc("get_kv_cache_specs")
        return list(self._kv_cache_specs)

    def determine_available_memory(self) -> list[int]:
        """Returns the bytes for the KV cache of each rank, after a real profile run."""
        if self._available_memory is None:
            self._available_memory = self.collective_rpc("determine_available_memory")
        return list(self._available_memory)

    def initialize_from_config(self, kv_cache_configs: Sequence[KVCacheConfig]) -> None:
        """Allocate the caches, one config per rank, then warm up. Nothing happens for configs equal to the last ones."""
        configs = list(kv_cache_configs)
        assert len(configs) == self.world_size, f"{len(configs)} KV cache configs for {self.world_size} ranks"
        if configs == self._kv_cache_configs:
            return
        self._call("initialize_from_config", [(config,) for config in configs]).result()
        self._kv_cache_configs = configs

    # -- steps -------------------------------------------------------------------------------------------------

    @overload
    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: Literal[False] = False
    ) -> ModelRunnerOutput: ...
    @overload
    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: Literal[True]
    ) -> Future[ModelRunnerOutput]: ...
    @overload
    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput]: ...
    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        """Run one step on all ranks. Each call must have a larger step id than the call before.

        The output of `output_rank` is returned when every rank has ended the step. If a rank reports an error, it is raised at
        once. With `non_block` every error is in the future, also if the executor is closed. The caller may wait for the futures
        in any order.

        A step may take `execute_model_timeout_seconds`. Its time begins with the call, with the end of the step before it, or
        when its masks are sent, whichever is last.
        """
        pending = PendingStep(scheduler_output, self.world_size, self.output_rank)
        command = ExecuteModel(epoch=self._table.epoch, scheduler_output=scheduler_output)
        with self._send_lock:
            if self._table.add(pending):
                for rank in range(self.world_size):
                    self._send(rank, command)
        future: Future[ModelRunnerOutput] = pending.future
        return future if non_block else future.result()

    def provide_grammar_output(self, step_id: int, grammar_output: GrammarOutput) -> None:
        """Send the masks of a submitted step whose plan has `grammar_rows`. To be called once for each such step, in any order.

        The rank that draws gets the masks. The other ranks of its stage get a notice without masks. No rank replies; if a rank
        cannot take the masks, the step fails. If the executor is closed or has lost a rank, nothing is sent. Returns at once.
        """
        epoch = self._table.epoch
        full = ProvideGrammarOutput(epoch=epoch, step_id=step_id, grammar_output=grammar_output)
        notice = ProvideGrammarOutput(
            epoch=epoch, step_id=step_id, grammar_output=replace(grammar_output, masks=grammar_output.masks[:0])
        )
        with self._send_lock:
            if self._table.masks_sent(step_id):
                for rank in range(self.output_rank, self.world_size):
                    self._send(rank, full if rank == self.output_rank else notice)

    def execute_dummy_batch(self) -> None:
        """Run a forward pass that belongs to no request, on all ranks, within the budget of a step."""
        self.collective_rpc("execute_dummy_batch", timeout=self._step_budget)

    # -- everything else is one call ---------------------------------------------------------------------------
    # Arguments and values are Any: the worker's method says what it takes and returns.

    def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """Call a public method of every worker, behind the steps and calls that were submitted before.

        Returns:
            A list with one value per rank. With `unique_reply_rank` the value of that rank, as soon as it has replied; the
            other ranks run the call, too, and their failures are logged. With `non_block` a future of the list or the value.

        Args:
            timeout: seconds from now, for this call and the steps before it. If None, wait as long as the ranks live.
        """
        assert unique_reply_rank is None or 0 <= unique_reply_rank < self.world_size, unique_reply_rank
        future = self._call(method, [tuple(args)] * self.world_size, kwargs, timeout, unique_reply_rank)
        return future if non_block else future.result()

    def _call(
        self,
        method: str,
        args_of_rank: list[tuple[Any, ...]],
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
    ) -> Future[Any]:
        call_id, epoch = next(self._call_ids), self._table.epoch
        pending = PendingCall(call_id, method, self.world_size, timeout, unique_reply_rank)
        with self._send_lock:
            if self._table.add(pending):
                for rank, args in enumerate(args_of_rank):
                    command = RpcCall(epoch=epoch, call_id=call_id, method=method, args=args, kwargs=dict(kwargs or {}))
                    self._send(rank, command)
        return pending.future

    # -- health and end ----------------------------------------------------------------------------------------

    def root_cause(self, error: RankError) -> RankError:
        """The cause of a failed step: the first error of any rank that is not an echo. When a rank leaves its groups, the
        others fail, too, often in an older step. To be called when no more steps will run. Waits ROOT_CAUSE_SECONDS at most.
        """
        cause = self._table.root_cause(error, ROOT_CAUSE_SECONDS)
        self._has_silent_rank = isinstance(cause, StepTimeoutError)
        return cause

    def raise_if_lost(self) -> None:
        """Check, without asking the ranks, whether steps are still possible.

        Raises:
            EngineClosedError, WorkerDiedError: no more steps are possible.
        """
        self._table.raise_if_unusable("the next step")

    def set_death_callback(self, on_death: Callable[[], None]) -> None:
        """When a rank has died, a thread of the executor calls `on_death`. It wakes an idle engine, and must not block."""
        self._table.set_death_callback(on_death)

    def check_health(self) -> None:
        """Ask every rank whether it can serve; raises if one cannot. This call and the steps before it may together take the
        budget of a step."""
        self._table.raise_if_unusable("check_health")  # a closed or broken executor needs no round trip
        self.collective_rpc("check_health", timeout=self._step_budget)

    def shutdown(self) -> None:
        """Fail what is pending with `EngineClosedError`, then stop the ranks. Idempotent: a second call returns at once.

        Takes a bounded time, whatever the ranks are doing.
        """
        if self._shut_down.acquire(blocking=False):
            self._table.close()
            self._terminate()

    # -- what a concrete executor supplies ---------------------------------------------------------------------

    @abstractmethod
    def _launch(self) -> None:
        """Start every rank and wait until its worker is constructed and its model is loaded.

        Raises:
            InflightError: the rank raised it. If it raised another error, a `WorkerDiedError` with the rank's traceback.
        """

    @abstractmethod
    def _send(self, rank: int, command: WorkerCommand) -> None:
        """Queue a message for a rank. Must not wait for the rank. Must not raise: if the rank is gone, call `_rank_died`."""

    @abstractmethod
    def _terminate(self) -> None:
        """Stop and forget every rank that was launched, also after a failed `_launch`. Called once; takes a bounded time."""

    @abstractmethod
    def _ask(self, rank: int) -> None:
        """Ask a rank what it is doing. Unless the rank hangs, it delivers a `WorkerActivity`, now or soon. Must not wait."""

    def _state(self, rank: int) -> str:
        """Describe a rank that does not answer `_ask`; "" if nothing is known of it. Must not wait and must not call the
        executor."""
        return ""

    # -- what a concrete executor calls ------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            self._launch()
        except BaseException:  # also KeyboardInterrupt: no rank outlives a constructor that failed
            self.shutdown()
            raise

    def _wait_until_started(self) -> None:
        """Wait for an entry of each rank in `_started`. Raises the first error."""
        for _ in range(self.world_size):
            error = self._started.get()
            if error is not None:
                raise error

    def _shutdown_deadline(self, *, is_broken: bool = False) -> float:
        """Returns the time until which `_terminate` waits for ranks to end by themselves, on the clock `time.monotonic()`."""
        seconds = MAX_BROKEN_SHUTDOWN_SECONDS if is_broken or self._has_silent_rank else MAX_SHUTDOWN_SECONDS
        return time.monotonic() + min(seconds, self._step_budget)

    def _deliver(self, reply: WorkerReply) -> None:
        """Process a rank's reply or activity. Called from any thread, in any order, any number of times."""
        self._table.deliver(reply)

    def _rank_died(self, rank: int, reason: str) -> None:
        """Note that a rank is gone for good. Called from any thread, any number of times."""
        self._table.rank_died(rank, reason)
