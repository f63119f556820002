"""`CommandLoop`: waits for a rank's commands, runs them on the worker and replies, until it is stopped."""

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

from inflight.executor.failures import failure_of
from inflight.executor.run_call import reply_of, run_call
from inflight.interface.messages import (
    ExecuteModel,
    ProvideGrammarOutput,
    RpcCall,
    StepReply,
    WorkerActivity,
    WorkerCommand,
    WorkerFailure,
    WorkerReply,
)
from inflight.interface.start_up import BeginEpoch, EpochCommand, EpochReply, JoinEpoch
from inflight.interface.step import ModelRunnerOutput
from inflight.interface.worker import WorkerBase

logger = logging.getLogger(__name__)


class CommandLoop(ABC):
    """Runs one rank's commands. Only the thread that calls `run` uses the worker. Other threads `put` the commands.

    A worker may return a future for a step. Then the loop goes on to the next command, and the thread that completes the future
    replies. A call (`RpcCall`) waits until all earlier steps have been answered, and all commands after the call wait too.
    There are two exceptions. The masks of a step that has begun do not wait, because the step cannot end without them. A call
    beside the steps waits only for calls that wait themselves, and like a step it may return a future.

    If a command raises an exception, the reply contains it, and the loop continues. SystemExit and KeyboardInterrupt end `run`.
    Then the rank dies, and the caller of `run` reports it.

    Args:
        reply: sends a reply. Called in any thread. Must not wait for anything that only this loop can do.
    """

    def __init__(self, rank: int, reply: Callable[[WorkerReply | EpochReply], None]) -> None:
        self._rank = rank
        self._reply = reply
        self._worker: WorkerBase | None = None
        self._commands: SimpleQueue[WorkerCommand | EpochCommand | None] = SimpleQueue()  # None: check `_waiting` again
        self._waiting: deque[WorkerCommand] = deque()  # the first may wait for steps, the others wait for the first
        self._steps: dict[int, ExecuteModel] = {}  # steps in flight; no lock: single dict operations are atomic
        self._unanswered: set[int] = set()  # ids of steps that have not been answered
        self._lock = threading.Lock()  # for `_unanswered`, and for decisions about `_waiting` that depend on it
        self._method = ""  # name of the call that runs now
        self._epoch = -1  # commands of older epochs are dropped
        self._num_dropped = 0
        self._is_stopped = False

    # -- for any thread ------------------------------------------------------------------------------------------------

    def put(self, command: WorkerCommand | EpochCommand) -> None:
        if isinstance(command, BeginEpoch):
            self._epoch = command.epoch
            self._leave_epoch()
        self._commands.put(command)

    def stop(self) -> None:
        """End the loop after the current command, even if steps are in flight. Waiting commands are not run."""
        self._is_stopped = True
        self._commands.put(None)

    @property
    def activity(self) -> str:
        """Text that says what the rank does now."""
        worker = self._worker
        if worker is None:
            return "starting"
        steps = list(self._steps)
        if steps:
            running = f"running step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
        elif self._method:
            running = f"running {self._method}()"
        else:
            return "waiting for a command"
        phase = worker.phase()
        return f"{running}: {phase}" if phase else running

    def report(self) -> WorkerActivity:
        """Returns the answer to `AskActivity`."""
        is_waiting = self._worker is not None and self._worker.is_waiting()
        return WorkerActivity(rank=self._rank, text=self.activity, is_waiting=is_waiting)

    # -- in the rank's thread ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run commands until `stop`, or until the worker cannot be constructed. At the end, shut the worker down."""
        try:
            while not self._is_stopped:
                command = self._commands.get()
                if not self._is_stopped:
                    self._take(command)
        finally:
            self._close()
            if self._worker is not None:
                try:
                    self._worker.shutdown()
                except Exception:
                    logger.exception("rank %d: shutdown of its worker failed", self._rank)

    def _take(self, command: WorkerCommand | EpochCommand | None) -> None:
        if command is not None and command.epoch < self._epoch:
            self._num_dropped += 1
        elif isinstance(command, BeginEpoch):
            self._begin_epoch(command)
        elif isinstance(command, JoinEpoch):
            self._join_epoch(command)
        elif isinstance(command, ProvideGrammarOutput) and command.step_id in self._steps:
            self._run(command)
        elif command is not None:
            self._waiting.append(command)
        while self._waiting and self._may_run(self._waiting[0]):
            self._run(self._waiting.popleft())

    def _may_run(self, command: WorkerCommand) -> bool:
        """Whether `command` need not wait. If it must wait, the loop is woken when the last step has been answered."""
        with self._lock:
            return not isinstance(command, RpcCall) or command.beside or not self._unanswered

    def _run(self, command: WorkerCommand) -> None:
        match command:
            case ExecuteModel():
                self._run_step(command)
            case ProvideGrammarOutput():
                self._provide(command)
            case RpcCall(beside=True):
                self._run_beside(command)
            case RpcCall():
                self._method = command.method
                reply = run_call(self._worker, self._rank, command)
                self._method = ""
                self._reply(reply)

    def _run_step(self, command: ExecuteModel) -> None:
        assert self._worker is not None, "JoinEpoch is the first command"
        step_id = command.scheduler_output.step_id
        self._steps[step_id] = command
        with self._lock:
            self._unanswered.add(step_id)
        try:
            output = self._worker.execute_model(command.scheduler_output)
        except Exception as error:
            self._answer_step(command, failure=failure_of(error))
            return
        if isinstance(output, Future):
            output.add_done_callback(partial(self._step_done, command))
        else:
            self._answer_step(command, output)

    def _provide(self, command: ProvideGrammarOutput) -> None:
        step = self._steps.get(command.step_id)
        if step is None:
            return  # the step has failed
        assert self._worker is not None, "JoinEpoch is the first command"
        try:
            self._worker.provide_grammar_output(command.step_id, command.grammar_output)
        except Exception as error:  # masks have no reply of their own, so the step is answered with the failure
            self._answer_step(step, failure=failure_of(error))

    def _step_done(self, command: ExecuteModel, future: Future[ModelRunnerOutput]) -> None:
        """Answer the step. Called in the thread that has completed the future, or has cancelled it at shutdown."""
        try:
            output = future.result()
        except BaseException as error:  # no caller handles it
            self._answer_step(command, failure=failure_of(error))
        else:
            self._answer_step(command, output)

    def _answer_step(
        self, command: ExecuteModel, output: ModelRunnerOutput | None = None, failure: WorkerFailure | None = None
    ) -> None:
        """Reply with the output or the failure."""
        step_id = command.scheduler_output.step_id
        if output is not None and output.step_id != step_id:
            error = AssertionError(f"the worker answered step {step_id} with step {output.step_id}")
            output, failure = None, failure_of(error)
        if self._steps.pop(step_id, None) is None:
            return  # the step has failed already
        reply = StepReply(epoch=command.epoch, step_id=step_id, rank=self._rank, output=output, failure=failure)
        self._reply(reply)
        if failure is not None and command.epoch >= self._epoch and self._worker is not None:
            self._worker.leave_groups("a step failed on it")
        with self._lock:
            self._unanswered.discard(step_id)
            is_awaited = self._waiting and not self._unanswered
        if is_awaited:
            self._commands.put(None)

    def _run_beside(self, command: RpcCall) -> None:
        """Begin the call. If the method returns a future, the thread that completes the future replies."""
        begun = run_call(self._worker, self._rank, command)
        if isinstance(begun.value, Future):
            begun.value.add_done_callback(lambda future: self._reply(reply_of(self._rank, command, future.result)))
        else:
            self._reply(begun)

    # -- epochs: worker_loop.py ----------------------------------------------------------------------------------------

    @abstractmethod
    def _leave_epoch(self) -> None:
        """End the waits for other ranks, because a new epoch begins. Called in the thread that puts the commands."""

    @abstractmethod
    def _begin_epoch(self, command: BeginEpoch) -> None: ...

    @abstractmethod
    def _join_epoch(self, command: JoinEpoch) -> None: ...

    @abstractmethod
    def _close(self) -> None:
        """The loop has ended. The worker is shut down afterwards."""
