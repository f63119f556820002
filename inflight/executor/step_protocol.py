"""`StepProtocol`: sends steps and calls to all ranks of one model replica, and returns their results as futures.

    execute_model ── add to the ReplyTable ── _send(rank, command) ──▶ rank ──▶ _deliver(reply) ── ReplyTable ──▶ future

Order matters in two places. All ranks get the messages in the same order, even if several threads send, because collectives on
the ranks need it. A message is added to the table before it is sent, because its reply may come before `_send` returns.

`Executor` (executor.py) adds the life of the ranks: their start, their faults and their end.
"""

import itertools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Literal, overload

from inflight.config.engine import EngineConfig
from inflight.config.ranks import Place
from inflight.errors import RankError, StepTimeoutError
from inflight.executor.pending import PendingCall, PendingStep
from inflight.executor.reply_table import ReplyTable
from inflight.interface.messages import ExecuteModel, ProvideGrammarOutput, RpcCall, WorkerCommand, WorkerReply
from inflight.interface.start_up import EpochCommand, EpochReply, Listening, Ready, StartUpFailed
from inflight.interface.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput

ROOT_CAUSE_SECONDS = 0.5  # how long to wait, after the first error of a step, for the error that caused it


class StepProtocol(ABC):
    """The part of an executor that each step uses. Its errors are those of `Executor`."""

    def __init__(self, config: EngineConfig) -> None:
        parallel = config.parallel
        self.config = config
        self.world_size = parallel.world_size
        self.places: tuple[Place, ...] = parallel.places  # where each rank runs
        self.output_rank = parallel.world_size - parallel.tensor_parallel_size  # first rank of the last pipeline stage
        self._step_budget = config.execute_model_timeout_seconds
        self._table = ReplyTable(step_budget=self._step_budget, ask=self._ask, state=self._state)
        self._has_silent_rank = False  # True: a rank does not answer, so others may wait for it for ever
        self._call_ids = itertools.count()
        self._send_lock = threading.Lock()  # held while one message goes to all ranks

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on the machine of the engine. Only their clock readings can be compared with the engine's."""
        return tuple(place.rank for place in self.places if place.machine == 0)

    # -- steps -------------------------------------------------------------------------------------------------

    @overload
    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: Literal[False] = False, *, budget: float = math.inf
    ) -> ModelRunnerOutput: ...
    @overload
    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: Literal[True], *, budget: float = math.inf
    ) -> Future[ModelRunnerOutput]: ...
    @overload
    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool, *, budget: float = math.inf
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput]: ...
    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False, *, budget: float = math.inf
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        """Run one step on all ranks. The step id must be larger than in the previous call.

        Returns the output of `output_rank` when every rank has ended the step. Raises an error as soon as a rank reports it.
        With `non_block` it returns a future, and every error is set in the future, even if the executor is closed. The caller
        may wait for the futures in any order.

        A step may take `budget` seconds, but at most `execute_model_timeout_seconds`. This time begins with the latest of three
        events: this call, the end of the step before, and the sending of the step's masks.
        """
        pending = PendingStep(scheduler_output, self.world_size, self.output_rank, budget)
        command = ExecuteModel(epoch=self._table.epoch, scheduler_output=scheduler_output)
        with self._send_lock:
            if self._table.add(pending):
                for rank in range(self.world_size):
                    self._send(rank, command)
        future: Future[ModelRunnerOutput] = pending.future
        return future if non_block else future.result()

    def provide_grammar_output(self, step_id: int, grammar_output: GrammarOutput) -> None:
        """Send the masks of a submitted step whose plan has `grammar_rows`. Call it once for each such step, in any order.

        The rank that draws gets the masks. The other ranks of its pipeline stage get a notice without masks. No rank replies.
        If a rank cannot use the masks, the step fails. If the executor is closed or has lost a rank, nothing is sent. Returns
        at once.
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
        """Run a forward pass that belongs to no request, on all ranks, within the time allowed for a step."""
        self.collective_rpc("execute_dummy_batch", timeout=self._step_budget)

    # -- other calls -------------------------------------------------------------------------------------------
    # Arguments and results are typed Any, because each method of the worker has its own.

    def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        beside: bool = False,
    ) -> Any:
        """Call a public method of every worker, after the steps and calls that were submitted before.

        Returns:
            A list with one value per rank. With `unique_reply_rank` only the value of that rank, as soon as it has replied. The
            other ranks run the call, too, and their failures are logged. With `non_block` a future of the list or the value.

        Args:
            timeout: seconds from now for this call, including the steps before it. If None, wait as long as the ranks live.
            beside: the call does not wait until the steps before it have ended, and later commands do not wait for it. The
                method may return a future, whose result is the rank's value. If an epoch begins meanwhile, the call fails.
        """
        assert unique_reply_rank is None or 0 <= unique_reply_rank < self.world_size, unique_reply_rank
        future = self._call(method, [tuple(args)] * self.world_size, kwargs, timeout, unique_reply_rank, beside)
        return future if non_block else future.result()

    def _call(
        self,
        method: str,
        args_of_rank: list[tuple[Any, ...]],
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
        beside: bool = False,
    ) -> Future[Any]:
        call_id, epoch = next(self._call_ids), self._table.epoch
        pending = PendingCall(call_id, method, self.world_size, timeout, unique_reply_rank)
        with self._send_lock:
            if self._table.add(pending):
                for rank, args in enumerate(args_of_rank):
                    named = dict(kwargs or {})
                    call = RpcCall(epoch=epoch, call_id=call_id, method=method, args=args, kwargs=named, beside=beside)
                    self._send(rank, call)
        return pending.future

    # -- health ------------------------------------------------------------------------------------------------

    def root_cause(self, error: RankError) -> RankError:
        """Returns the error that caused a failed step. When a rank fails, it leaves its process groups, and the other ranks
        fail, too, often in an older step. Such an error is called an echo. The cause is the first error that is not an echo.
        Call this when no more steps will run. Waits at most ROOT_CAUSE_SECONDS.
        """
        cause = self._table.root_cause(error, ROOT_CAUSE_SECONDS)
        self._has_silent_rank = isinstance(cause, StepTimeoutError)
        return cause

    def raise_if_lost(self) -> None:
        """Check, without asking the ranks, whether steps are still possible.

        Raises:
            EngineClosedError: the executor was shut down.
            WorkerDiedError: a rank has died.
        """
        self._table.raise_if_unusable("the next step")

    def set_death_callback(self, on_death: Callable[[], None]) -> None:
        """A thread of the executor calls `on_death` when a rank has died, to wake an idle engine. It must not block."""
        self._table.set_death_callback(on_death)

    def check_health(self) -> None:
        """Ask every rank whether it can serve. Raises if one cannot. This call and the steps before it must end within the time
        that is allowed for one step."""
        self._table.raise_if_unusable("check_health")  # a closed or broken executor needs no round trip
        self.collective_rpc("check_health", timeout=self._step_budget)

    # -- what the ranks answer ---------------------------------------------------------------------------------

    def _deliver(self, reply: WorkerReply | EpochReply) -> None:
        """Process a message of a rank. May be called from any thread, in any order, and more than once."""
        if isinstance(reply, Listening | Ready | StartUpFailed):
            self._take_epoch_reply(reply)
        else:
            self._table.deliver(reply)

    @abstractmethod
    def _take_epoch_reply(self, reply: EpochReply) -> None:
        """Process a message about the beginning of an epoch."""

    # -- methods that a concrete executor implements -----------------------------------------------------------

    @abstractmethod
    def _send(self, rank: int, command: WorkerCommand | EpochCommand) -> None:
        """Queue a message for a rank. Must not wait for the rank and must not raise. If the rank is gone, call `_rank_died`."""

    @abstractmethod
    def _ask(self, rank: int) -> None:
        """Ask a rank what it is doing. If the rank does not hang, it soon delivers a `WorkerActivity`. Must not wait."""

    def _state(self, rank: int) -> str:
        """Returns what is known of a rank that does not answer `_ask`; "" if nothing is known. Must not wait and must not call
        other methods of the executor."""
        return ""
