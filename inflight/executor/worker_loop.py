"""What runs on a rank: take a command, run it on the worker, reply; until there is no command any more."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

from inflight.errors import InflightError, WorkerDiedError
from inflight.executor.pending import named_error
from inflight.interface.messages import (
    ExecuteModel,
    ProvideGrammarOutput,
    RpcCall,
    RpcReply,
    StepReply,
    WorkerActivity,
    WorkerCommand,
    WorkerFailure,
    WorkerReply,
)
from inflight.interface.step import ModelRunnerOutput
from inflight.interface.worker import WorkerBase


class Inbox:
    """A rank's commands, from the thread that brings them to the one that runs them."""

    def __init__(self) -> None:
        self._commands: SimpleQueue[WorkerCommand | None] = SimpleQueue()
        self.is_stopped = False
        self.loop: WorkerLoop | None = None  # the loop that runs the commands; None until it exists

    @property
    def activity(self) -> str:
        """What the rank is doing, as text. Any thread may call it."""
        return "starting" if self.loop is None else self.loop.activity

    def report(self, rank: int) -> WorkerActivity:
        """The answer to `AskActivity`. Any thread may call it."""
        return WorkerActivity(rank=rank, text=self.activity, is_waiting=self.loop is not None and self.loop.is_waiting)

    def put(self, command: WorkerCommand) -> None:
        self._commands.put(command)

    def wake(self) -> None:
        """Let the next `get` return None, behind the commands that are there."""
        self._commands.put(None)

    def stop(self) -> None:
        """End the loop after the current command; those still here are not run."""
        self.is_stopped = True
        self.wake()

    def get(self) -> WorkerCommand | None:
        """Waits for a command, or for `wake`."""
        return self._commands.get()


class WorkerLoop:
    """One rank's loop, in the one thread that touches the worker.

    A step may be given back as a future: the loop then takes the next command, and replies when the future is done, from
    whichever thread does it. A call is run when all steps before it have been answered; what comes behind it waits too, but
    for masks of steps under way, without which these would not end.

    An exception of a command becomes its reply, and the loop goes on. What is no `Exception` (SystemExit, KeyboardInterrupt)
    leaves `run`: it is the death of the rank, for the caller to report.

    Args:
        inbox: where the commands come from; its `stop` ends the loop, whatever steps are under way.
        reply: sends a reply or an event, from any thread. Must not wait for anything that only this loop can do.
    """

    def __init__(self, worker: WorkerBase, rank: int, inbox: Inbox, reply: Callable[[WorkerReply], None]) -> None:
        self._worker = worker
        self._rank = rank
        self._inbox = inbox
        self._reply = reply
        self._method = ""  # of the call that runs
        self._steps: dict[int, ExecuteModel] = {}  # under way; single operations of a dictionary are atomic
        self._held: deque[WorkerCommand] = deque()  # a call that waits for steps, and what came after it
        self._lock = threading.Lock()
        self._num_unanswered = 0  # steps; guarded by the lock, as is what it means for `_held`
        inbox.loop = self

    @property
    def activity(self) -> str:
        """What the rank is doing, as text. Any thread may call it."""
        steps = list(self._steps)
        if steps:
            running = f"running step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
        elif self._method:
            running = f"running {self._method}()"
        else:
            return "waiting for a command"
        phase = self._worker.phase()
        return f"{running}: {phase}" if phase else running

    @property
    def is_waiting(self) -> bool:
        """Whether the rank waits for another rank. Any thread may call it."""
        return self._worker.is_waiting()

    def run(self) -> None:
        while not self._inbox.is_stopped:
            command = self._inbox.get()
            if not self._inbox.is_stopped:
                self._take(command)

    def _take(self, command: WorkerCommand | None) -> None:
        if command is not None and not self._is_held(command):
            self._run(command)
        while self._held and not self._must_wait(self._held[0]):
            self._run(self._held.popleft())

    def _is_held(self, command: WorkerCommand) -> bool:
        """Whether the command has been put behind others that cannot run yet."""
        if isinstance(command, ProvideGrammarOutput) and command.step_id in self._steps:
            return False
        with self._lock:
            if self._held or (isinstance(command, RpcCall) and self._num_unanswered):
                self._held.append(command)
                return True
        return False

    def _must_wait(self, command: WorkerCommand) -> bool:
        """If so, the answer to the last step wakes the loop."""
        with self._lock:
            return isinstance(command, RpcCall) and self._num_unanswered > 0

    def _run(self, command: WorkerCommand) -> None:
        match command:
            case ExecuteModel():
                self._run_step(command)
            case ProvideGrammarOutput():
                self._provide(command)
            case RpcCall():
                self._method = command.method
                reply = self._run_call(command)
                self._method = ""
                self._reply(reply)

    def _run_step(self, command: ExecuteModel) -> None:
        self._steps[command.scheduler_output.step_id] = command
        with self._lock:
            self._num_unanswered += 1
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
            return  # it has failed
        try:
            self._worker.provide_grammar_output(command.step_id, command.grammar_output)
        except Exception as error:  # it has no answer of its own: its step fails
            self._answer_step(step, failure=failure_of(error))

    def _step_done(self, command: ExecuteModel, future: Future[ModelRunnerOutput]) -> None:
        """In the thread that has completed the future, or cancelled it at shutdown."""
        try:
            output = future.result()
        except BaseException as error:  # of the step; this thread has nobody above it
            self._answer_step(command, failure=failure_of(error))
        else:
            self._answer_step(command, output)

    def _answer_step(
        self, command: ExecuteModel, output: ModelRunnerOutput | None = None, failure: WorkerFailure | None = None
    ) -> None:
        """With one of the two."""
        step_id = command.scheduler_output.step_id
        if output is not None and output.step_id != step_id:
            error = AssertionError(f"the worker answered step {step_id} with step {output.step_id}")
            output, failure = None, failure_of(error)
        if self._steps.pop(step_id, None) is None:
            return  # it has failed already
        reply = StepReply(epoch=command.epoch, step_id=step_id, rank=self._rank, output=output, failure=failure)
        self._reply(reply)
        if failure is not None:
            self._worker.leave_groups_after_failure()
        with self._lock:
            self._num_unanswered -= 1
            is_awaited = self._held and not self._num_unanswered
        if is_awaited:
            self._inbox.wake()

    def _run_call(self, command: RpcCall) -> RpcReply:
        value, failure = None, None
        method = None if command.method.startswith("_") else getattr(self._worker, command.method, None)
        if not callable(method):
            failure = self._no_such_method(command.method)
        else:
            try:
                value = method(*command.args, **command.kwargs)
            except Exception as error:
                failure = failure_of(error)
        return RpcReply(epoch=command.epoch, call_id=command.call_id, rank=self._rank, value=value, failure=failure)

    def _no_such_method(self, name: str) -> WorkerFailure:
        cls = type(self._worker)
        known = [known for known in dir(cls) if not known.startswith("_") and callable(getattr(cls, known))]
        message = f"{cls.__name__} has no public method {name!r}; it has {', '.join(known)}"
        return WorkerFailure(type_name="AttributeError", message=message, traceback="")


def failure_of(error: BaseException) -> WorkerFailure:
    return WorkerFailure(
        type_name=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        is_echo=isinstance(error, ConnectionError | TimeoutError),  # of `World`: another rank is gone
    )


def start_up_error(rank: int, failure: WorkerFailure) -> InflightError:
    """What the executor raises. The user's mistake stays what it was on the rank; its traceback is a note. All else is the
    death of the rank."""
    if (error := named_error(rank, failure)) is not None:
        return error
    message = f"rank {rank} could not start: {failure.type_name}: {failure.message}"
    return WorkerDiedError(message, rank=rank, worker_traceback=failure.traceback)


def failed_reply(
    to: ExecuteModel | RpcCall | StepReply | RpcReply, rank: int, failure: WorkerFailure
) -> StepReply | RpcReply:
    """The reply that is sent if `to`, a command or its answer, cannot be encoded."""
    kind, number = to.key
    if kind == "step":
        return StepReply(epoch=to.epoch, step_id=number, rank=rank, failure=failure)
    return RpcReply(epoch=to.epoch, call_id=number, rank=rank, failure=failure)
