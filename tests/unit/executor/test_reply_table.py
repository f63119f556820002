"""The reply table without ranks: the corners that no real executor reaches on purpose."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np
import pytest

from inflight.errors import EngineClosedError, RankError, StepError, StepTimeoutError, WorkerDiedError
from inflight.executor.pending import PendingCall, PendingStep
from inflight.executor.reply_table import ReplyTable
from inflight.interface.messages import RpcReply, StepReply, WorkerActivity, WorkerFailure
from inflight.interface.step import ModelRunnerOutput
from tests.conformance.configs import plan

NUM_RANKS = 2
FAILURE = WorkerFailure(type_name="RuntimeError", message="bad luck", traceback="Traceback ...")


ECHO = WorkerFailure(type_name="ConnectionError", message="rank 1 has left", traceback="", is_echo=True)


def make_table(budget: float = 60.0, answering: Collection[int] = (), waiting: Collection[int] = ()) -> ReplyTable:
    """`answering`: the ranks that say what they do when they are asked. `waiting`: those of them that wait for another."""

    def ask(rank: int) -> None:
        if rank in answering:
            table.deliver(WorkerActivity(rank=rank, text="awake", is_waiting=rank in waiting))

    table = ReplyTable(step_budget=budget, ask=ask, state=lambda rank: "process 7 is asleep")
    return table


@pytest.fixture
def table() -> Iterator[ReplyTable]:
    table = make_table()
    yield table
    table.close()


def add_step(table: ReplyTable, step_id: int, request_ids: tuple[str, ...] = ("a",)) -> PendingStep:
    step = PendingStep(plan(step_id, request_ids), NUM_RANKS, output_rank=0)
    table.add(step)
    return step


def add_call(
    table: ReplyTable, call_id: int, *, unique: int | None = None, timeout: float | None = None
) -> PendingCall:
    call = PendingCall(call_id, "f", NUM_RANKS, timeout, unique)
    table.add(call)
    return call


def answer_step(table: ReplyTable, step_id: int, rank: int, failure: WorkerFailure | None = None) -> None:
    output = ModelRunnerOutput(step_id=step_id) if failure is None else None
    table.deliver(StepReply(epoch=0, step_id=step_id, rank=rank, output=output, failure=failure))


def test_a_death_wakes_an_idle_engine(table: ReplyTable) -> None:
    calls: list[int] = []
    table.set_death_callback(lambda: calls.append(1))
    table.rank_died(1, "gone")
    assert calls == [1]
    table.set_death_callback(lambda: calls.append(2))
    assert calls == [1, 2]


def test_step_ids_must_rise(table: ReplyTable) -> None:
    add_step(table, 3)
    for step_id in (3, 2):
        with pytest.raises(AssertionError, match="ids must increase"):
            add_step(table, step_id)


def test_ids_of_steps_and_calls_are_apart(table: ReplyTable) -> None:
    step, call = add_step(table, 0), add_call(table, 0)
    for rank in range(NUM_RANKS):
        answer_step(table, 0, rank)
    assert step.future.done()
    assert not call.future.done()


def test_a_duplicate_does_not_stand_for_another_rank(table: ReplyTable) -> None:
    step, call = add_step(table, 0), add_call(table, 0)
    for _ in range(3):
        answer_step(table, 0, 1)
        table.deliver(RpcReply(epoch=0, call_id=0, rank=1, value="x"))
    assert not step.future.done()
    assert not call.future.done()


def test_the_first_failure_is_the_one_that_is_raised(table: ReplyTable, caplog: pytest.LogCaptureFixture) -> None:
    step = add_step(table, 0)
    answer_step(table, 0, 1, FAILURE)
    answer_step(table, 0, 0, WorkerFailure(type_name="ConnectionError", message="peer left", traceback=""))
    with pytest.raises(StepError, match="bad luck") as caught:
        step.future.result(timeout=0)
    assert caught.value.rank == 1
    assert "peer left" in caplog.text  # and the others are in the log


def test_a_steps_requests_are_named_up_to_a_limit(table: ReplyTable) -> None:
    step = add_step(table, 0, tuple(f"r{i}" for i in range(11)))
    answer_step(table, 0, 1, FAILURE)
    error = step.future.exception(timeout=0)
    assert isinstance(error, StepError)
    assert "r6, r7 and 3 more)" in str(error)
    assert len(error.request_ids) == 11


def test_steps_may_end_out_of_order(table: ReplyTable) -> None:
    """The younger one by an error; the older one still has its budget."""
    older, younger = add_step(table, 0), add_step(table, 1)
    answer_step(table, 0, 0)
    answer_step(table, 1, 0, FAILURE)
    assert younger.future.done()
    assert not older.future.done()
    assert older.deadline < math.inf
    answer_step(table, 0, 1)
    assert older.future.done()


def test_a_timeout_says_what_the_ranks_do() -> None:
    table = make_table(budget=0.02)
    step = add_step(table, 0)
    answer_step(table, 0, 0)
    with pytest.raises(
        StepTimeoutError,
        match=r"from rank 1 \(process 7 is asleep; does not .*; has answered no step yet\)\. If a step may take longer, raise",
    ):
        step.future.result(timeout=300)
    table.close()


def test_a_timeout_names_first_the_rank_that_says_nothing() -> None:
    """Rank 0 waits for rank 1 and can say so: the error is rank 1's."""
    table = make_table(budget=0.05, answering=[0])
    step = add_step(table, 3)
    error = step.future.exception(timeout=300)
    assert isinstance(error, StepTimeoutError)
    assert error.rank == 1
    assert re.search(r"from rank 1 \(process 7 is asleep; .*\), rank 0 \(awake\)\. If", str(error))
    table.close()


def test_a_rank_that_answers_when_it_is_asked_has_not_answered_its_step() -> None:
    table = make_table(budget=0.05, answering=[0, 1])
    add_step(table, 2)
    for rank in range(NUM_RANKS):
        answer_step(table, 2, rank)
    error = add_step(table, 3).future.exception(timeout=300)
    assert "from rank 0 (awake), rank 1 (awake)" in str(error)
    table.close()


def test_if_all_say_what_they_do_the_error_is_that_of_a_rank_which_waits_for_nobody() -> None:
    table = make_table(budget=0.05, answering=[0, 1], waiting=[0])
    error = add_step(table, 3).future.exception(timeout=300)
    assert isinstance(error, StepTimeoutError)
    assert error.rank == 1
    assert "from rank 1 (awake), rank 0 (awake, waiting for another rank)" in str(error)
    table.close()


def test_ranks_have_time_to_say_what_they_do_also_when_they_are_asked_late(table: ReplyTable) -> None:
    step = add_step(table, 0)
    with table._changed:
        step.ask_at, step.deadline = 10.0, 11.0
        assert table._due_questions(20.0) == [0, 1]
        assert (step.deadline, step.ask_at) == (21.0, math.inf)


def test_deadlines_of_steps_begin_one_after_the_other(table: ReplyTable) -> None:
    """A younger step does not move the deadline of an older one. Ranks are asked shortly before it."""
    older = add_step(table, 0)
    deadline = older.deadline
    assert older.ask_at == pytest.approx(deadline - 0.5)
    younger = add_step(table, 1)
    assert (older.deadline, younger.deadline) == (deadline, math.inf)
    for rank in range(NUM_RANKS):
        answer_step(table, 0, rank)
    assert older.deadline == math.inf and deadline <= younger.deadline < math.inf
    call = add_call(table, 0, timeout=1.0)
    assert call.ask_at == pytest.approx(call.deadline - 0.1)
    assert add_call(table, 1).deadline == math.inf


def expire(table: ReplyTable, step: PendingStep) -> RankError:
    """Let the deadline of a step pass, and return its error."""
    with table._changed:
        step.ask_at = math.inf
        settlements = table._expire(step.deadline)
    for settlement in settlements:
        settlement()
    return failed(step)


@pytest.mark.parametrize(("budget", "hint"), [(60.0, True), (math.inf, True), (59.0, False)])
def test_only_the_longest_time_can_be_raised(table: ReplyTable, budget: float, hint: bool) -> None:
    step = PendingStep(plan(0, ("a",)), NUM_RANKS, output_rank=0, budget=budget)
    table.add(step)
    error = str(expire(table, step))
    assert f"had no reply within {min(budget, 60.0):g} s" in error
    assert ("INFLIGHT_EXECUTE_MODEL_TIMEOUT_SECONDS" in error) is hint


def test_a_timeout_says_which_step_a_silent_rank_has_answered_last(table: ReplyTable) -> None:
    add_step(table, 2)
    answer_step(table, 2, 1)
    answer_step(table, 2, 0)
    error = expire(table, add_step(table, 3))
    assert "rank 1 (process 7 is asleep; does not say what it is doing; answered step 2 last)" in str(error)
    table.begin_epoch(error)
    assert "has answered no step yet" in str(expire(table, add_step(table, 4)))


def test_an_older_answer_to_the_question_does_not_count() -> None:
    table = make_table(answering=[0, 1])
    step = add_step(table, 0)
    table._ask_all([0, 1])
    table._ask = lambda rank: None  # from now on no rank answers
    table._ask_all([1])
    assert "from rank 1 (process 7 is asleep; " in str(expire(table, step))
    table.close()


def test_the_longest_time_of_the_steps_in_flight(table: ReplyTable) -> None:
    assert table.longest_budget == 0.0
    add_call(table, 0, timeout=50.0)
    assert table.longest_budget == 0.0
    for step_id, budget in enumerate((2.0, 9.0, 5.0)):
        table.add(PendingStep(plan(step_id, ("a",)), NUM_RANKS, output_rank=0, budget=budget))
    assert table.longest_budget == 9.0
    add_step(table, 3)  # its own limit is infinite
    assert table.longest_budget == 60.0


# -- results -----------------------------------------------------------------------------------------------------------


def test_the_result_of_a_step_has_the_time_of_the_slowest_rank(table: ReplyTable) -> None:
    for step_id, times in enumerate([(1.0, 3.0), (3.0, 1.0), (3.0, 3.0)]):
        step = add_step(table, step_id)
        for rank, seconds in enumerate(times):
            shares_cores = step_id == 2 and rank == 1
            tokens = ModelRunnerOutput(step_id=step_id, compute_seconds=seconds, shares_cores=shares_cores)
            table.deliver(StepReply(epoch=0, step_id=step_id, rank=rank, output=tokens))
        assert step.future.result(timeout=0).compute_seconds == 3.0
        assert step.future.result(timeout=0).shares_cores == (step_id == 2), "true if it is so on any rank"


def test_the_result_of_a_step_has_the_refused_images_of_all_ranks(table: ReplyTable) -> None:
    step = add_step(table, 0)
    for rank in (1, 0):  # rank 0 has the output; in a pipeline, other ranks compute the images
        refused = ((bytes(32), "too odd"),) if rank == 1 else ()
        output = ModelRunnerOutput(step_id=0, refused_images=refused)
        table.deliver(StepReply(epoch=0, step_id=0, rank=rank, output=output))
    assert step.future.result(timeout=0).refused_images == ((bytes(32), "too odd"),)


def test_the_values_of_a_call_are_in_the_order_of_the_ranks(table: ReplyTable) -> None:
    call = add_call(table, 0)
    for rank in (1, 0):
        table.deliver(RpcReply(epoch=0, call_id=0, rank=rank, value=f"of {rank}"))
    assert call.future.result(timeout=0) == ["of 0", "of 1"]


def test_the_reply_of_one_rank_may_be_enough(table: ReplyTable) -> None:
    call = add_call(table, 0, unique=1)
    table.deliver(RpcReply(epoch=0, call_id=0, rank=0, value="of 0"))
    assert not call.future.done()
    table.deliver(RpcReply(epoch=0, call_id=0, rank=1, value="of 1"))
    assert call.future.result(timeout=0) == "of 1"
    others = add_call(table, 1, unique=1), add_call(table, 2, unique=0)
    table.rank_died(0, "gone")
    assert [other.future.done() for other in others] == [False, True]
    table.deliver(RpcReply(epoch=0, call_id=1, rank=1, value="of 1"))
    assert others[0].future.result(timeout=0) == "of 1"


def test_commands_are_accepted_again_when_a_rank_is_replaced(table: ReplyTable) -> None:
    table.rank_died(1, "gone")
    assert isinstance(add_step(table, 0).future.exception(timeout=0), WorkerDiedError)
    assert not table.masks_sent(0)
    table.replaced(1)
    table.raise_if_unusable("a step")
    assert not add_step(table, 1).future.done()
    assert table.masks_sent(1)


# -- the cause of an error ---------------------------------------------------------------------------------------------


def failed(step: PendingStep) -> RankError:
    error = step.future.exception(timeout=0)
    assert isinstance(error, RankError)
    return error


@pytest.mark.parametrize("echo_first", [True, False])
def test_the_cause_of_a_failed_step_may_be_in_a_younger_one(table: ReplyTable, echo_first: bool) -> None:
    """Rank 1 fails in step 1 and leaves its groups: rank 0, and rank 1 itself, cannot end step 0."""
    steps = [add_step(table, 0), add_step(table, 1)]
    answers = [(0, 0, ECHO), (0, 1, ECHO), (1, 1, FAILURE), (1, 0, ECHO)]
    for step_id, rank, failure in answers if echo_first else sorted(answers, key=lambda answer: -answer[0]):
        answer_step(table, step_id, rank, failure)
    error = failed(steps[0])
    assert error.is_echo
    cause = table.root_cause(error, 0.0)
    assert "bad luck" in str(cause)
    assert (cause.rank, cause.step_id, cause.is_echo) == (1, 1, False)


def test_the_cause_may_come_a_moment_later(table: ReplyTable) -> None:
    step = add_step(table, 0)
    answer_step(table, 0, 0, ECHO)
    threading.Timer(0.02, answer_step, (table, 0, 1, FAILURE)).start()
    start = time.monotonic()
    cause = table.root_cause(failed(step), 300.0)
    assert time.monotonic() - start < 60
    assert (cause.rank, cause.summary) == (1, "a step failed on rank 1 (RuntimeError)")


def test_a_death_is_the_cause_of_what_the_others_say(table: ReplyTable) -> None:
    step = add_step(table, 0)
    answer_step(table, 0, 0, ECHO)
    table.rank_died(1, "killed")
    cause = table.root_cause(failed(step), 0.0)
    assert isinstance(cause, WorkerDiedError)
    assert str(cause) == "rank 1 was lost (killed) before it answered step 0 (requests: a)"


def test_a_rank_for_which_another_has_waited_too_long_is_the_cause() -> None:
    """A collective may give up before the step's time is over: then there is an echo and no cause but silence."""
    table = make_table(answering=[0])
    step = add_step(table, 0)
    answer_step(table, 0, 0, ECHO)
    cause = table.root_cause(failed(step), 0.01)
    assert isinstance(cause, StepTimeoutError)
    assert cause.rank == 1
    assert re.search(r"no reply from rank 1 \(process 7 .*\), for which rank 0 waited: step 0 .*has left", str(cause))
    table.close()


def test_an_echo_without_a_cause_stands_for_itself(table: ReplyTable) -> None:
    step = add_step(table, 0)
    for rank in range(NUM_RANKS):
        answer_step(table, 0, rank, ECHO)
    assert table.root_cause(failed(step), 0.0) is failed(step)


def test_a_timeout_is_the_cause_of_later_echoes(table: ReplyTable) -> None:
    steps = [add_step(table, step_id) for step_id in range(2)]
    timeout = expire(table, steps[0])
    answer_step(table, 1, 0, ECHO)
    assert table.root_cause(failed(steps[1]), 0.0) is timeout


def test_ranks_are_asked_only_if_the_cause_is_not_known() -> None:
    asked: list[int] = []
    table = ReplyTable(step_budget=60.0, ask=asked.append, state=lambda rank: "")
    step = add_step(table, 0)
    answer_step(table, 0, 0, ECHO)
    table.root_cause(failed(step), 0.0)
    assert asked == [1]
    answer_step(table, 0, 1, FAILURE)
    table.root_cause(failed(step), 0.0)
    assert asked == [1]
    table.close()


def test_the_last_answer_may_come_while_the_cause_is_sought() -> None:
    """It is an echo, too, so nothing is known but the first error."""
    table = ReplyTable(step_budget=60.0, ask=lambda rank: answer_step(table, 0, rank, ECHO), state=lambda rank: "")
    step = add_step(table, 0)
    answer_step(table, 0, 0, ECHO)
    assert table.root_cause(failed(step), 0.0) is failed(step)
    table.close()


def test_a_short_deadline_overtakes_a_long_one(table: ReplyTable) -> None:
    add_step(table, 0)  # the watcher sleeps for a minute
    call = add_call(table, 0, timeout=0.02)
    assert isinstance(call.future.exception(timeout=300), StepTimeoutError)
    call = add_call(table, 1, timeout=0.02)
    assert isinstance(call.future.exception(timeout=300), StepTimeoutError)


def test_the_time_of_a_step_that_waits_for_masks_begins_when_they_are_sent() -> None:
    """Until then it is the engine that keeps the ranks waiting."""
    table = make_table(budget=0.05)
    masked = replace(plan(0, ("a",)), grammar_rows=np.array([0], dtype=np.int32))
    steps = [PendingStep(replace(masked, step_id=step_id), NUM_RANKS, output_rank=0) for step_id in range(2)]
    for step in steps:
        table.add(step)
    assert table.masks_sent(1)
    with pytest.raises(TimeoutError):
        steps[0].future.result(timeout=0.3)
    assert table.masks_sent(0)
    for step_id, step in enumerate(steps):
        with pytest.raises(StepTimeoutError, match=f"step {step_id} .*had no reply within 0.05 s"):
            step.future.result(timeout=300)
    table.close()
    assert not table.masks_sent(0)


def test_a_budget_may_be_infinite() -> None:
    table = make_table(budget=math.inf)
    step = add_step(table, 0)
    assert isinstance(add_call(table, 0, timeout=0.01).future.exception(timeout=300), StepTimeoutError)
    for rank in range(NUM_RANKS):
        answer_step(table, 0, rank)
    assert step.future.done()
    table.close()


def test_a_death_spares_what_the_rank_has_answered(table: ReplyTable) -> None:
    answered, waiting = add_step(table, 0), add_step(table, 1)
    answer_step(table, 0, 1)
    table.rank_died(1, "gone")
    table.rank_died(1, "gone twice")
    assert not answered.future.done()
    assert isinstance(waiting.future.exception(timeout=0), WorkerDiedError)
    answer_step(table, 0, 0)
    assert answered.future.result(timeout=0).step_id == 0
    answer_step(table, 1, 0)
    assert not table._pending  # nothing more can come of it: it is forgotten, though one rank has not answered


def test_a_callback_may_use_the_table(table: ReplyTable) -> None:
    """Futures are settled outside the lock."""
    calls: list[PendingCall] = []
    step = add_step(table, 0)
    step.future.add_done_callback(lambda _: calls.append(add_call(table, 0)))
    for rank in range(NUM_RANKS):
        answer_step(table, 0, rank)
    assert len(calls) == 1


def test_a_callback_of_a_timeout_may_close_the_table() -> None:
    table = make_table(budget=0.02)
    step = add_step(table, 0)
    closed = threading.Event()

    def close(_: object) -> None:
        table.close()
        closed.set()

    step.future.add_done_callback(close)
    assert closed.wait(300)


def test_close_is_idempotent_and_ends_everything(caplog: pytest.LogCaptureFixture) -> None:
    table = make_table()
    step = add_step(table, 0)
    table.close()
    table.close()
    assert not table._watcher.is_alive()
    assert isinstance(step.future.exception(timeout=0), EngineClosedError)
    answer_step(table, 0, 0)
    table.rank_died(0, "too late to matter")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# -- epochs --------------------------------------------------------------------------------------------------------------


def test_a_new_epoch_fails_what_is_pending_and_forgets_deaths_and_errors(table: ReplyTable) -> None:
    step, call = add_step(table, 0), add_call(table, 0)
    table.rank_died(1, "gone")
    cause = step.future.exception(timeout=0)
    assert isinstance(cause, WorkerDiedError)
    assert table.begin_epoch(cause) == {1}
    assert isinstance(call.future.exception(timeout=0), WorkerDiedError)
    table.raise_if_unusable("a step")
    late = add_step(table, 1)
    for rank in range(NUM_RANKS):
        answer_step(table, 0, rank)  # of epoch 0
        answer_step(table, 1, rank)
    assert not late.future.done() and table.num_stale == 4
    for epoch in (1, 2):
        table.deliver(StepReply(epoch=epoch, step_id=1, rank=0, output=ModelRunnerOutput(step_id=1)))
    assert table.num_stale == 4  # these are not older
    error = StepError("an echo", rank=0, step_id=1, is_echo=True)
    assert table.root_cause(error, 0.0) is not cause


def test_a_step_may_have_a_shorter_time_than_the_longest(table: ReplyTable) -> None:
    step = PendingStep(plan(0, ("a",)), NUM_RANKS, output_rank=0, budget=0.05)
    start = time.monotonic()
    table.add(step)
    with pytest.raises(StepTimeoutError, match=r"had no reply within 0.05 s") as caught:
        step.future.result(timeout=300)
    assert time.monotonic() - start < 30  # the longest is 60 s
    assert "INFLIGHT_EXECUTE_MODEL_TIMEOUT_SECONDS" not in str(caught.value)
