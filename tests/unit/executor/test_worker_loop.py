"""One rank's loop, without a thread and without an executor."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from inflight.config.ranks import places_on
from inflight.executor import worker_loop
from inflight.executor.worker_loop import WorkerLoop
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
from inflight.interface.start_up import BeginEpoch, EpochReply, JoinEpoch, Listening, Ready, StartUpFailed
from inflight.interface.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from inflight.interface.worker import Rendezvous, WorkerBase
from inflight.sockets import listen
from tests.conformance.configs import engine_config, plan
from tests.conformance.scripted_worker import ScriptedWorker
from tests.support.waits import wait_until

WAITS = "waiting for a command"


def call(call_id: int, method: str, *args: Any) -> RpcCall:
    return RpcCall(epoch=5, call_id=call_id, method=method, args=args, kwargs={})


class Script(SimpleQueue[WorkerCommand | None]):
    """These commands, and then the end, when whatever holds a call back has ended."""

    def __init__(self, loop: WorkerLoop, *commands: WorkerCommand) -> None:
        self._loop = loop
        self._script = iter(commands)

    def get(self, block: bool = True, timeout: float | None = None) -> WorkerCommand | None:
        command = next(self._script, None)
        if command is None:
            self._loop.stop()
        return command


def scripted(replies: list[WorkerReply | EpochReply], *commands: WorkerCommand) -> WorkerLoop:
    loop = WorkerLoop(3, replies.append, no_worker)
    loop._commands = Script(loop, *commands)
    return loop


def no_worker(rendezvous: Rendezvous | None) -> WorkerBase:
    raise AssertionError("the test gives the loop its worker")


def run_with(loop: WorkerLoop, worker: WorkerBase) -> None:
    loop._worker = worker
    loop.run()


def run(worker: ScriptedWorker, *commands: WorkerCommand) -> list[WorkerReply]:
    replies: list[WorkerReply | EpochReply] = []
    run_with(scripted(replies, *commands), worker)
    return replies


def worker() -> ScriptedWorker:
    return ScriptedWorker(engine_config(), places_on([0] * 4)[3], None)


def test_commands_are_answered_in_order_with_epoch_id_and_rank() -> None:
    step = ExecuteModel(epoch=5, scheduler_output=plan(7))
    first, second = run(worker(), step, call(9, "echo", 1))
    assert isinstance(first, StepReply)
    assert isinstance(first.output, ModelRunnerOutput)
    assert (first.epoch, first.step_id, first.rank) == (5, 7, 3)
    assert second == RpcReply(epoch=5, call_id=9, rank=3, value=(3, (1,), {}))


def test_an_exception_becomes_the_reply_and_the_loop_goes_on() -> None:
    step = ExecuteModel(epoch=5, scheduler_output=plan(7))
    replies = run(worker(), call(0, "script", 3, 7, "raise", "bad luck"), step, call(1, "fail", 3, "again"))
    assert isinstance(replies[1], StepReply)
    assert isinstance(replies[2], RpcReply)
    for failure, text in ((replies[1].failure, "bad luck"), (replies[2].failure, "again")):
        assert isinstance(failure, WorkerFailure)
        assert (failure.type_name, failure.message) == ("RuntimeError", text)
        assert "in fail" in failure.traceback


def test_wrong_arguments_are_a_failure_of_the_call() -> None:
    (reply,) = run(worker(), call(0, "sleep", 1, 2, 3, 4))
    assert isinstance(reply, RpcReply)
    assert reply.failure is not None
    assert reply.failure.type_name == "TypeError"


def test_an_answer_to_another_step_is_a_failure() -> None:
    class Confused(ScriptedWorker):
        def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            return replace(super().execute_model(scheduler_output), step_id=0)

    (reply,) = run(
        Confused(engine_config(), places_on([0] * 4)[3], None), ExecuteModel(epoch=5, scheduler_output=plan(7))
    )
    assert isinstance(reply, StepReply)
    assert isinstance(reply.failure, WorkerFailure)
    assert "answered step 7 with step 0" in reply.failure.message


@pytest.mark.parametrize("death", [SystemExit, KeyboardInterrupt])
def test_what_is_no_exception_leaves_the_loop(death: type[BaseException]) -> None:
    class Mortal(ScriptedWorker):
        def check_health(self) -> None:
            raise death("the end")

    with pytest.raises(death, match="the end"):
        run(Mortal(engine_config(), places_on([0] * 4)[3], None), call(0, "check_health"))


def test_activity_says_what_runs() -> None:
    seen: list[str] = []

    class Watched(ScriptedWorker):
        def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            seen.append(loop.activity)
            return super().execute_model(scheduler_output)

        def check_health(self) -> None:
            seen.append(loop.activity)

    loop = WorkerLoop(3, lambda _: seen.append(loop.activity), no_worker)
    loop._commands = Script(loop, ExecuteModel(epoch=5, scheduler_output=plan(7)), call(0, "check_health"))
    run_with(loop, Watched(engine_config(), places_on([0] * 4)[3], None))
    assert seen == ["running step 7", WAITS, "running check_health()", WAITS]


def test_activity_says_in_which_phase_a_step_is() -> None:
    class Timed(ScriptedWorker):
        def phase(self) -> str:
            return "forward of step 7 for 3.9 s"

        def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            assert loop.activity == "running step 7: forward of step 7 for 3.9 s"
            return super().execute_model(scheduler_output)

    replies: list[WorkerReply | EpochReply] = []
    loop = scripted(replies, ExecuteModel(epoch=5, scheduler_output=plan(7)))
    assert loop.activity == "starting"
    run_with(loop, Timed(engine_config(), places_on([0] * 4)[3], None))
    assert isinstance(replies[0], StepReply) and isinstance(replies[0].output, ModelRunnerOutput)
    assert loop.activity == WAITS


class Staged(ScriptedWorker):
    """Gives every step back as a future that the test completes."""

    def __init__(self) -> None:
        super().__init__(engine_config(), places_on([0] * 4)[3], None)
        self.futures: dict[int, Future[ModelRunnerOutput]] = {}
        self.failed: list[int] = []
        self.replies: list[WorkerReply | EpochReply] = []
        self.masks: list[int] = []

    def provide_grammar_output(self, step_id: int, grammar_output: GrammarOutput) -> None:
        self.masks.append(step_id)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        self.futures[scheduler_output.step_id] = Future()
        return self.futures[scheduler_output.step_id]

    def end(self, step_id: int) -> None:
        output = ModelRunnerOutput(step_id=step_id)
        self.futures[step_id].set_result(output)

    def leave_groups(self, reason: str) -> None:
        self.failed.append(len(self.replies))


def step(step_id: int) -> ExecuteModel:
    return ExecuteModel(epoch=5, scheduler_output=plan(step_id))


def masks(step_id: int) -> ProvideGrammarOutput:
    nothing = np.empty(0, dtype=np.int32)
    return ProvideGrammarOutput(
        epoch=5, step_id=step_id, grammar_output=GrammarOutput(rows=nothing, num_masks=nothing, masks=nothing[None])
    )


def test_the_next_step_is_begun_before_the_one_before_has_ended_and_a_call_waits_for_both() -> None:
    staged = Staged()
    loop = WorkerLoop(3, staged.replies.append, no_worker)
    thread = threading.Thread(
        target=run_with, args=(loop, staged), daemon=True
    )  # a failing test leaves it, and pytest still ends
    thread.start()
    # behind the call everything waits, but the masks that a step under way needs
    for command in (step(7), step(8), call(0, "echo", 1), step(9), masks(9), masks(8), call(1, "echo", 2)):
        loop.put(command)
    wait_until(lambda: staged.masks == [8])
    assert loop.activity == "running steps 7, 8"
    assert staged.replies == []
    staged.end(7)
    assert loop.activity == "running step 8"
    assert [type(reply).__name__ for reply in staged.replies] == ["StepReply"]
    staged.end(8)
    wait_until(lambda: staged.masks == [8, 9])
    staged.end(9)
    wait_until(lambda: len(staged.replies) == 5)
    loop.stop()
    thread.join(300)
    assert not thread.is_alive()
    assert [getattr(reply, "step_id", "call") for reply in staged.replies] == [7, 8, "call", 9, "call"]
    assert loop.activity == WAITS


def test_masks_of_a_step_that_has_failed_go_nowhere() -> None:
    staged = Staged()
    run_with(scripted(staged.replies, step(7), masks(6), masks(7)), staged)
    assert staged.masks == [7]


def test_masks_that_cannot_be_taken_fail_their_step() -> None:
    class Broken(Staged):
        def provide_grammar_output(self, step_id: int, grammar_output: GrammarOutput) -> None:
            raise RuntimeError("no room")

    staged = Broken()
    run_with(scripted(staged.replies, step(7), step(8), masks(7), masks(7)), staged)
    staged.end(7)  # too late: it has been answered
    staged.end(8)
    failed, ended = staged.replies
    assert isinstance(failed, StepReply) and isinstance(ended, StepReply)
    assert isinstance(failed.failure, WorkerFailure) and failed.failure.message == "no room"
    assert (failed.step_id, ended.step_id) == (7, 8)
    assert isinstance(ended.output, ModelRunnerOutput)


@pytest.mark.parametrize("error", [RuntimeError("bad luck"), SystemExit("no way out"), None])
def test_a_step_that_fails_later_is_answered_and_then_the_worker_is_told(error: BaseException | None) -> None:
    staged = Staged()
    run_with(scripted(staged.replies, step(7)), staged)
    if error is None:
        assert staged.futures[7].cancel()  # as at shutdown
    else:
        staged.futures[7].set_exception(error)
    (reply,) = staged.replies
    assert isinstance(reply, StepReply)
    assert isinstance(reply.failure, WorkerFailure)
    assert reply.failure.type_name == ("CancelledError" if error is None else type(error).__name__)
    assert staged.failed == [1]  # after the reply


def test_a_step_that_cannot_begin_is_told_too() -> None:
    class Broken(Staged):
        def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
            raise RuntimeError("no input")

    staged = Broken()
    run_with(scripted(staged.replies, step(7), call(0, "echo")), staged)
    assert [type(reply).__name__ for reply in staged.replies] == ["StepReply", "RpcReply"]
    assert staged.failed == [1]


def test_a_step_that_fails_after_a_new_epoch_has_begun_leaves_no_groups() -> None:
    """They may be those of the new epoch."""
    staged = Staged()
    loop = scripted(staged.replies, step(7))
    run_with(loop, staged)
    loop.put(BeginEpoch(epoch=6))
    assert staged.failed == [0]
    staged.futures[7].set_exception(RuntimeError("the other rank has left"))
    assert len(staged.replies) == 1 and staged.failed == [0]


def test_private_methods_cannot_be_called() -> None:
    class Private(ScriptedWorker):
        def _secret(self) -> str:
            return "secret"

    (reply,) = run(Private(engine_config(), places_on([0] * 4)[3], None), call(0, "_secret"))
    assert isinstance(reply, RpcReply) and reply.failure is not None
    assert reply.failure.type_name == "AttributeError"
    assert "has no public method '_secret'; its public methods are " in reply.failure.message


def test_nothing_is_run_after_a_stop() -> None:
    replies: list[WorkerReply | EpochReply] = []
    loop = WorkerLoop(3, replies.append, no_worker)
    loop.put(call(0, "echo", 1))
    loop.stop()
    run_with(loop, worker())
    assert replies == []


# -- epochs --------------------------------------------------------------------------------------------------------------


def new_loop(replies: list[WorkerReply | EpochReply], worker: WorkerBase) -> WorkerLoop:
    loop = WorkerLoop(3, replies.append, lambda rendezvous: worker)
    threading.Thread(target=loop.run, daemon=True).start()
    loop.put(BeginEpoch(epoch=5))
    loop.put(JoinEpoch(epoch=5, rendezvous=None))
    wait_until(lambda: len(replies) == 2)
    assert replies == [Listening(rank=3, epoch=5, address=("", 0), num_dropped=0), Ready(rank=3, epoch=5)]
    replies.clear()
    return loop


def test_a_new_epoch_drops_all_that_is_older_and_answers_nothing_of_it() -> None:
    staged = Staged()
    loop = new_loop(staged.replies, staged)
    for command in (step(7), call(0, "echo", 1), step(8)):  # the call waits for step 7, and step 8 for the call
        loop.put(command)
    wait_until(lambda: 7 in staged.futures)
    loop.put(BeginEpoch(epoch=6))
    loop.put(step(9))  # it was sent before the executor knew of the fault
    wait_until(lambda: bool(staged.replies))
    assert staged.failed == [0], "the groups are left by the thread that reads the commands, before the answer"
    assert staged.replies == [Listening(rank=3, epoch=6, address=("", 0), num_dropped=2)]
    staged.end(7)
    loop.put(JoinEpoch(epoch=6, rendezvous=None))
    loop.put(replace(call(1, "calls"), epoch=6))
    wait_until(lambda: len(staged.replies) == 3)
    assert staged.replies[1] == Ready(rank=3, epoch=6)
    reply = staged.replies[2]
    assert isinstance(reply, RpcReply) and reply.epoch == 6
    assert 8 not in staged.futures and 9 not in staged.futures
    loop.put(BeginEpoch(epoch=7))
    wait_until(lambda: len(staged.replies) == 4)
    # step 9; the older ones have been told already
    assert staged.replies[3] == Listening(rank=3, epoch=7, address=("", 0), num_dropped=1)
    loop.stop()


def test_a_worker_that_cannot_end_its_steps_or_join_says_so_and_lives_on() -> None:
    class Broken(Staged):
        def end_steps(self) -> None:
            raise RuntimeError("not idle")

        def join_epoch(self, rendezvous: Rendezvous | None) -> None:
            raise ConnectionError("rank 1 has left")

    broken = Broken()
    loop = new_loop(broken.replies, broken)
    loop.put(BeginEpoch(epoch=6))
    loop.put(JoinEpoch(epoch=6, rendezvous=None))
    wait_until(lambda: len(broken.replies) == 2)
    first, second = broken.replies
    assert isinstance(first, StartUpFailed) and isinstance(second, StartUpFailed)
    assert (first.failure.message, first.failure.is_echo, first.epoch) == ("not idle", False, 6)
    assert (second.failure.message, second.failure.is_echo) == ("rank 1 has left", True)
    loop.stop()


def test_a_worker_that_cannot_load_its_model_is_shut_down() -> None:
    class Broken(Staged):
        is_shut_down = False

        def load_model(self) -> None:
            assert loop.activity == "starting"
            raise RuntimeError("no such file")

        def shutdown(self) -> None:
            self.is_shut_down = True

    broken = Broken()
    loop = WorkerLoop(3, broken.replies.append, lambda rendezvous: broken)
    loop.put(BeginEpoch(epoch=0))
    loop.put(JoinEpoch(epoch=0, rendezvous=None))
    loop.run()
    assert isinstance(broken.replies[1], StartUpFailed) and loop.has_failed
    assert broken.is_shut_down


def test_it_is_said_that_a_rank_joins_an_epoch() -> None:
    seen: list[str] = []

    class Joining(Staged):
        def join_epoch(self, rendezvous: Rendezvous | None) -> None:
            seen.append(loop.activity)

    joining = Joining()
    loop = new_loop(joining.replies, joining)
    loop.put(BeginEpoch(epoch=6))
    loop.put(JoinEpoch(epoch=6, rendezvous=None))
    wait_until(lambda: len(joining.replies) == 2)
    assert (*seen, loop.activity) == ("running join_epoch()", WAITS)
    loop.stop()


def test_a_worker_that_is_made_while_a_new_epoch_begins_leaves_the_groups_of_the_old_one() -> None:
    """`put` has found no worker that it could tell."""
    staged = Staged()

    def make(rendezvous: Rendezvous | None) -> WorkerBase:
        loop.put(BeginEpoch(epoch=6))
        return staged

    loop = WorkerLoop(3, staged.replies.append, make)
    for command in (BeginEpoch(epoch=5), JoinEpoch(epoch=5, rendezvous=None)):
        loop._take(command)
    assert staged.failed == [1]


def test_a_worker_that_cannot_be_constructed_ends_the_loop() -> None:
    replies: list[WorkerReply | EpochReply] = []
    loop = WorkerLoop(3, replies.append, no_worker, "127.0.0.1")
    loop.put(BeginEpoch(epoch=0))
    loop.put(JoinEpoch(epoch=0, rendezvous=None))
    loop.run()
    assert loop.has_failed
    listening, failed = replies
    assert isinstance(listening, Listening) and listening.address[0] == "127.0.0.1" and listening.address[1] > 0
    assert isinstance(failed, StartUpFailed)


def test_a_new_epoch_ends_the_wait_of_a_constructor_and_the_next_epoch_constructs_again() -> None:
    replies: list[WorkerReply | EpochReply] = []
    waits = threading.Event()

    def meet(rendezvous: Rendezvous | None) -> WorkerBase:
        """In epoch 5 the other rank never connects."""
        assert rendezvous is not None and rendezvous.listen_fd is not None
        with socket.socket(fileno=rendezvous.listen_fd) as listener:
            if rendezvous.epoch == 5:
                waits.set()
                listener.accept()
        return worker()

    loop = WorkerLoop(3, replies.append, meet, "127.0.0.1")
    threading.Thread(target=loop.run, daemon=True).start()
    for epoch in (5, 6):
        loop.put(BeginEpoch(epoch=epoch))
        place = Rendezvous(epoch=epoch, timeout_seconds=60, token=b"", addresses=(("127.0.0.1", 1),))
        wait_until(lambda: any(isinstance(reply, Listening) and reply.epoch == epoch for reply in replies))  # noqa: B023  # it is called at once
        loop.put(JoinEpoch(epoch=epoch, rendezvous=place))
        assert waits.wait(300)
    wait_until(lambda: len(replies) == 4)
    assert [(type(reply).__name__, reply.epoch) for reply in replies if not isinstance(reply, WorkerActivity)] == [
        ("Listening", 5),
        ("StartUpFailed", 5),
        ("Listening", 6),
        ("Ready", 6),
    ]
    assert not loop.has_failed
    loop.stop()


def test_a_rank_that_cannot_reach_the_others_tries_again_in_the_next_epoch() -> None:
    replies: list[WorkerReply | EpochReply] = []
    makers = iter([refuse, lambda: worker()])
    loop = WorkerLoop(3, replies.append, lambda rendezvous: next(makers)())
    threading.Thread(target=loop.run, daemon=True).start()
    for epoch in (5, 6):
        loop.put(BeginEpoch(epoch=epoch))
        loop.put(JoinEpoch(epoch=epoch, rendezvous=None))
        wait_until(lambda: len(replies) == 2 * (epoch - 4))  # noqa: B023  # it is called at once
    failed, ready = replies[1], replies[3]
    assert isinstance(failed, StartUpFailed) and failed.failure.is_echo
    assert ready == Ready(rank=3, epoch=6)
    loop.stop()


def refuse() -> WorkerBase:
    raise ConnectionRefusedError("rank 1 does not listen")


def test_a_rank_names_the_ranks_that_it_cannot_reach_and_listens_on() -> None:
    replies: list[WorkerReply | EpochReply] = []
    loop = WorkerLoop(0, replies.append, lambda rendezvous: refuse(), "127.0.0.1", called=(1, 2))
    runner = threading.Thread(target=loop.run, daemon=True)
    runner.start()
    loop.put(BeginEpoch(epoch=5))
    wait_until(lambda: len(replies) == 1)
    (listening,) = replies
    assert isinstance(listening, Listening)
    with listen("127.0.0.1", 0) as one, socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        addresses = (
            listening.address,
            one.getsockname(),
            deaf.getsockname(),
            ("127.0.0.1", 1),
        )  # it does not call rank 3
        place = Rendezvous(epoch=5, timeout_seconds=60, token=b"", addresses=addresses)
        loop.put(JoinEpoch(epoch=5, rendezvous=place))
        wait_until(lambda: len(replies) == 2)
        failed = replies[1]
        assert isinstance(failed, StartUpFailed)
        assert (failed.failure.lost_ranks, failed.failure.is_echo, failed.epoch) == ((2,), True, 5)
        assert "rank 0 cannot reach ranks 2" in failed.failure.message
        socket.create_connection(listening.address, 5).close()
    loop.stop()
    runner.join(300)


def test_a_rank_that_begins_an_epoch_twice_keeps_its_address() -> None:
    """A new process of another node may learn the epoch by `StartUp` and by `BeginEpoch`. Others may have the first address."""
    replies: list[WorkerReply | EpochReply] = []
    loop = WorkerLoop(1, replies.append, lambda rendezvous: refuse(), "127.0.0.1")
    runner = threading.Thread(target=loop.run, daemon=True)
    runner.start()
    for count, epoch in enumerate((5, 5, 6), start=1):
        loop.put(BeginEpoch(epoch=epoch))
        wait_until(lambda: len(replies) == count)  # noqa: B023  # it is called at once
    first, again, later = [reply.address for reply in replies if isinstance(reply, Listening)]
    assert first == again != later
    socket.create_connection(later, 5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(first, 5)
    loop.stop()
    runner.join(300)


def test_a_new_epoch_ends_the_attempt_to_reach_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_loop, "REACH_SECONDS", 60.0)
    replies: list[WorkerReply | EpochReply] = []
    loop = WorkerLoop(0, replies.append, lambda rendezvous: refuse(), "127.0.0.1", called=(1,))
    runner = threading.Thread(target=loop.run, daemon=True)
    runner.start()
    with socket.socket() as full, contextlib.ExitStack() as clients:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(2):  # more connections than the listener keeps, so the next one gets no answer
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        place = Rendezvous(epoch=5, timeout_seconds=60, token=b"", addresses=(("127.0.0.1", 1), full.getsockname()))
        loop.put(BeginEpoch(epoch=5))
        loop.put(JoinEpoch(epoch=5, rendezvous=place))
        wait_until(lambda: len(replies) == 1)
        time.sleep(0.1)
        loop.put(BeginEpoch(epoch=6))
        wait_until(lambda: len(replies) == 3)
    assert isinstance(replies[2], Listening) and replies[2].epoch == 6
    loop.stop()
    runner.join(300)
