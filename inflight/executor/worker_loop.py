"""`WorkerLoop`: the main loop of a rank. It waits for a command, runs it on the worker and replies, until it is stopped.

It also makes the rank take part in epochs (recovery.py): `BeginEpoch` ends all work of older epochs, and `JoinEpoch` constructs
the worker, or connects it to the other ranks again.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

from inflight.errors import LostPeerError
from inflight.executor.failures import failure_of
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
from inflight.interface.start_up import BeginEpoch, EpochCommand, EpochReply, JoinEpoch, Listening, Ready, StartUpFailed
from inflight.interface.step import ModelRunnerOutput
from inflight.interface.worker import Rendezvous, WorkerBase
from inflight.sockets import REACH_SECONDS, listen, unreachable

logger = logging.getLogger(__name__)

NO_ADDRESS = ("", 0)


class WorkerLoop:
    """Runs one rank's commands. Only the thread that calls `run` uses the worker. Other threads `put` the commands.

    A worker may return a future for a step. Then the loop goes on to the next command, and the thread that completes the future
    replies. A call (`RpcCall`) waits until all earlier steps have been answered, and all commands after the call wait too.
    There is one exception: the masks of a step that has begun do not wait, because the step cannot end without them.

    If a command raises an exception, the reply contains it, and the loop continues. SystemExit and KeyboardInterrupt end `run`.
    Then the rank dies, and the caller of `run` reports it.

    A new epoch begins in two parts. `put`, in the thread that reads the commands, ends the waits for other ranks and marks all
    older commands. Then the loop drops these commands, waits until the worker is idle, and replies.

    Args:
        reply: sends a reply. Called in any thread. Must not wait for anything that only this loop can do.
        make_worker: constructs the worker of this rank, with the rendezvous of the first `JoinEpoch`.
        host: the address at which the rank listens for the other ranks. None if the ranks are threads.
        called: the ranks to which this rank opens connections.
    """

    def __init__(
        self,
        rank: int,
        reply: Callable[[WorkerReply | EpochReply], None],
        make_worker: Callable[[Rendezvous | None], WorkerBase],
        host: str | None = None,
        called: Sequence[int] = (),
    ) -> None:
        self._rank = rank
        self._reply = reply
        self._make_worker = make_worker
        self._host = host
        self._called = called
        self._worker: WorkerBase | None = None
        self._commands: SimpleQueue[WorkerCommand | EpochCommand | None] = SimpleQueue()  # None: check `_waiting` again
        self._waiting: deque[WorkerCommand] = deque()  # the first may wait for steps, the others wait for the first
        self._steps: dict[int, ExecuteModel] = {}  # steps in flight; no lock: single dict operations are atomic
        self._unanswered: set[int] = set()  # ids of steps that have not been answered
        self._lock = threading.Lock()  # for `_unanswered`, and for decisions about `_waiting` that depend on it
        self._method = ""  # name of the call that runs now
        self._epoch = -1  # commands of older epochs are dropped
        self._num_dropped = 0
        self._listener: socket.socket | None = None  # from `BeginEpoch` to `JoinEpoch`
        self._begun_epoch = -1  # of the last `BeginEpoch`
        self._first_listener: socket.socket | None = None  # a duplicate, while the worker is constructed
        self._is_stopped = False
        self.has_failed = False  # whether the worker could not be constructed

    # -- for any thread ------------------------------------------------------------------------------------------------

    def put(self, command: WorkerCommand | EpochCommand) -> None:
        if isinstance(command, BeginEpoch):
            self._epoch = command.epoch
            if self._worker is not None:
                self._worker.leave_groups("a new epoch begins")
            elif (listener := self._first_listener) is not None:
                with contextlib.suppress(OSError):  # it may just have been closed
                    listener.shutdown(socket.SHUT_RDWR)  # the constructor of the worker stops waiting for other ranks
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
            if self._listener is not None:
                self._listener.close()
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
            return not isinstance(command, RpcCall) or not self._unanswered

    def _begin_epoch(self, command: BeginEpoch) -> None:
        self._num_dropped += len(self._waiting)
        self._waiting.clear()
        try:
            if self._worker is not None:
                self._worker.end_steps()
            # A new process gets the number of its epoch with `StartUp`, and perhaps once more in a `BeginEpoch`. It must not
            # change its address: others may know the first one already.
            if self._host is not None and (self._listener is None or self._begun_epoch != command.epoch):
                if self._listener is not None:  # the epoch before has ended without `JoinEpoch`
                    self._listener.close()
                self._listener = listen(self._host, 0)
        except Exception as error:  # the executor replaces this rank
            logger.exception("this rank cannot begin epoch %d", command.epoch)
            self._reply(StartUpFailed(rank=self._rank, failure=failure_of(error), epoch=command.epoch))
            return
        self._begun_epoch = command.epoch
        self._steps.clear()
        with self._lock:
            self._unanswered.clear()
        host, port = NO_ADDRESS if self._listener is None else self._listener.getsockname()[:2]
        dropped, self._num_dropped = self._num_dropped, 0
        self._reply(Listening(rank=self._rank, epoch=command.epoch, address=(host, port), num_dropped=dropped))

    def _join_epoch(self, command: JoinEpoch) -> None:
        rendezvous = command.rendezvous
        if lost := self._unreachable(command):
            # the listener stays open, so this rank is not lost for the others, too, and they report only links that are broken
            message = f"rank {self._rank} cannot reach ranks {', '.join(map(str, lost))}"
            failure = failure_of(LostPeerError(message, *lost))
            self._reply(StartUpFailed(rank=self._rank, failure=failure, epoch=command.epoch))
            return
        if self._listener is not None:
            listener, self._listener = self._listener, None
            if rendezvous is None:
                listener.close()
            else:
                self._first_listener = listener.dup() if self._worker is None else None
                rendezvous = replace(rendezvous, listen_fd=listener.detach())
        self._epoch = max(self._epoch, command.epoch)
        self._method = "join_epoch"
        try:
            if self._worker is None:
                self._worker = self._loaded_worker(rendezvous)
                if command.epoch < self._epoch:  # `put` may have found no worker
                    self._worker.leave_groups("a new epoch begins")
            else:
                self._worker.join_epoch(rendezvous)
        except BaseException as error:  # also SystemExit, because the executor must get the reason
            failure = failure_of(error)
            self._reply(StartUpFailed(rank=self._rank, failure=failure, epoch=command.epoch))
            # if other ranks are the reason, this rank tries again in the next epoch, with its libraries imported
            if self._worker is None and not failure.is_echo and command.epoch == self._epoch:
                self._is_stopped = self.has_failed = True
            return
        finally:
            self._method = ""
            if self._first_listener is not None:
                listener, self._first_listener = self._first_listener, None
                listener.close()
        self._reply(Ready(rank=self._rank, epoch=command.epoch))

    def _unreachable(self, command: JoinEpoch) -> tuple[int, ...]:
        """The ranks that this rank must connect to, but cannot reach."""
        # ranks that are threads of one process have no addresses; with a store the others' addresses are not known yet
        if not isinstance(command.rendezvous, Rendezvous) or not command.rendezvous.addresses:
            return ()
        addresses = {rank: command.rendezvous.addresses[rank] for rank in self._called}
        return unreachable(addresses, REACH_SECONDS, lambda: self._epoch > command.epoch or self._is_stopped)

    def _loaded_worker(self, rendezvous: Rendezvous | None) -> WorkerBase:
        worker = self._make_worker(rendezvous)
        try:
            worker.load_model()
        except BaseException:
            worker.shutdown()
            raise
        return worker

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
        message = f"{cls.__name__} has no public method {name!r}; its public methods are {', '.join(known)}"
        return WorkerFailure(type_name="AttributeError", message=message, traceback="")
