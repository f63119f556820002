"""What only the executor of processes has: real signals, recoveries, and messages that cannot cross."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.errors import RankError, StepError, StepTimeoutError, WorkerDiedError
from inflight.executor import multiproc
from inflight.executor.multiproc import MultiprocExecutor, _Rank
from inflight.executor.rank_process import WorkerProcess
from inflight.executor.recovery import RecoveryResult, recover
from inflight.interface.start_up import BeginEpoch
from inflight.processes.child_process import wait_for_end
from tests.conformance.configs import engine_config, plan
from tests.support.enough_time import with_enough_time
from tests.support.plans import SAMPLING, new_request
from tests.support.processes import exists, have_ended
from tests.support.waits import wait_until
from tests.unit.executor.processes import SCRIPTED, pids_of, scripted_executor


@pytest.mark.parametrize("rank", [0, 1])
def test_sigkill_is_known_at_once(executor: MultiprocExecutor, rank: int) -> None:
    pids = pids_of(executor)
    executor.collective_rpc("script", (None, 0, "sleep", 300))
    future = executor.execute_model(plan(0), non_block=True)
    start = time.monotonic()
    os.kill(pids[rank], signal.SIGKILL)
    error = future.exception(timeout=300)
    seconds = time.monotonic() - start
    assert isinstance(error, WorkerDiedError)
    assert seconds < 60
    assert (error.rank, error.step_id, error.request_ids) == (rank, 0, ("req-a", "req-b"))
    assert f"rank {rank} was lost (process {pids[rank]} was killed by SIGKILL" in str(error)
    with pytest.raises(WorkerDiedError, match="is gone"):
        executor.check_health()


def test_a_death_while_idle_is_known_too(executor: MultiprocExecutor, caplog: pytest.LogCaptureFixture) -> None:
    pid = pids_of(executor)[1]
    os.kill(pid, signal.SIGSEGV)
    wait_until(lambda: "rank 1 was lost" in caplog.text)  # nobody has asked for anything
    error = executor.execute_model(plan(0), non_block=True).exception(timeout=0)
    assert isinstance(error, WorkerDiedError)
    assert "killed by SIGSEGV" in str(error)
    assert sum("rank 1 was lost" in record.getMessage() for record in caplog.records) == 1


def test_an_exit_names_its_code(executor: MultiprocExecutor) -> None:
    with pytest.raises(WorkerDiedError, match=r"rank 1 was lost \(process \d+ ended with exit code 1\)"):
        executor.collective_rpc("die", (1, "I leave"))


def test_what_was_sent_before_a_death_is_not_lost(executor: MultiprocExecutor) -> None:
    """The answer to the first call is still in the stream when the process is gone."""
    pids = pids_of(executor)
    is_blocked = threading.Event()

    def read_nothing_until_all_are_dead() -> None:
        is_blocked.set()
        have_ended(pids)

    executor._io.call_soon(read_nothing_until_all_are_dead)
    assert is_blocked.wait(300)
    answered = executor.collective_rpc("echo", (b"x" * 80_000,), non_block=True)
    executor.collective_rpc("die", (None, "I leave"), non_block=True)
    assert [value[0] for value in answered.result(timeout=300)] == [0, 1]


def test_a_stopped_rank_times_out_and_is_ended(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiproc, "PING_SECONDS", 3600.0)  # otherwise they may find it first

    def check(budget: float) -> None:
        caplog.clear()
        executor = scripted_executor(budget=budget)
        pids = pids_of(executor)
        os.kill(pids[1], signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(StepTimeoutError) as caught:
            executor.execute_model(plan(3))
        taken = time.monotonic() - start
        executor.shutdown()
        assert max(taken, time.monotonic() - start - taken) < 60 + budget
        assert not any(exists(pid) for pid in pids)
        assert "SIGKILL" in caplog.text
        assert (caught.value.rank, caught.value.step_id, caught.value.request_ids) == (1, 3, ("req-a", "req-b"))
        said = f"from rank 1 (process {pids[1]} is stopped by a signal; does not say what it is doing; "
        assert said in str(caught.value)

    with_enough_time(check)


def test_a_payload_for_a_stopped_rank_stalls_nobody() -> None:
    config = engine_config(tensor_parallel_size=2, backend="mp")
    intolerant = FaultToleranceConfig(enabled=False)  # otherwise the rank would be replaced after 0.75 s
    executor = MultiprocExecutor(dataclasses.replace(config, fault_tolerance=intolerant), SCRIPTED)
    try:
        pids = pids_of(executor)
        os.kill(pids[0], signal.SIGSTOP)
        start = time.monotonic()
        for _ in range(3):
            executor.collective_rpc("echo", (b"x" * 10_000_000,), non_block=True, unique_reply_rank=1)
        assert executor.collective_rpc("pid", unique_reply_rank=1, timeout=300) == pids[1]
        assert time.monotonic() - start < 60
        os.kill(pids[0], signal.SIGCONT)
        assert pids_of(executor) == pids
    finally:
        executor.shutdown()


@pytest.mark.usefixtures("new_interpreters")
def test_a_process_that_has_ended_is_seen_by_all_threads_at_once() -> None:
    """`Popen.poll` says None to one thread while another one asks; so a process could be taken for one that hangs."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = WorkerProcess("inflight: worker tp0 pp0", theirs.fileno())
        assert wait_for_end([process], 0.0) == [process]
        assert process.exit_code is None
        process.send_signal(signal.SIGKILL)
        with process._popen._waitpid_lock:
            assert wait_for_end([process], 300.0) == []
        assert process.exit_code == -signal.SIGKILL
        process.send_signal(signal.SIGTERM)  # does nothing
        process.close()


def test_the_death_of_a_replaced_process_is_not_charged_to_the_new_one(executor: MultiprocExecutor) -> None:
    pids = pids_of(executor)
    assert executor.begin_epoch(StepError("a step failed", rank=0)) == set()
    executor.send(0, BeginEpoch(epoch=1))
    executor.replace_rank(1)  # kills a process that lives, and is ready
    executor.join_epoch(time.monotonic() + 300)
    assert not executor.meeting.failed
    assert pids_of(executor)[0] == pids[0]
    assert executor.execute_model(plan(0)).step_id == 0


def error_after_a_kill(executor: MultiprocExecutor, *ranks: int) -> RankError:
    pids = pids_of(executor)
    future = executor.collective_rpc("sleep", (None, 0.3), non_block=True)
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)
    error = future.exception(timeout=300)
    assert isinstance(error, RankError)
    wait_until(lambda: set(ranks) <= executor._table._dead_ranks.keys())  # the others may take a moment longer to die
    return error


def test_a_spare_process_takes_the_place_of_a_rank_and_another_spare_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(multiproc, "SPARE_SECONDS", 0.1)
    config = engine_config(tensor_parallel_size=2, backend="mp", budget=10.0, name="scripted")
    config = dataclasses.replace(config, fault_tolerance=FaultToleranceConfig(spare_workers=1))
    executor = MultiprocExecutor(config, SCRIPTED)
    try:
        [(spare, _)] = executor._spares
        recover(executor, error_after_a_kill(executor, 1))
        assert pids_of(executor)[1] == spare.pid
        end = time.monotonic() + 300
        while executor.num_spares == 0:
            assert time.monotonic() < end, "no other spare was started"
            time.sleep(0.01)
        assert executor._spares[0][0].pid not in pids_of(executor)
    finally:
        executor.shutdown()


def test_two_ranks_that_are_killed_at_once_cost_one_epoch(executor: MultiprocExecutor) -> None:
    result = recover(executor, error_after_a_kill(executor, 1, 0))
    assert (result.epoch, result.replaced) == (1, (0, 1))
    time.sleep(0.2)  # a death that is delivered again would be known now
    executor.check_health()


@pytest.mark.parametrize(
    ("victim", "fault"),
    [("survivor", signal.SIGKILL), ("replacement", signal.SIGKILL), ("replacement", signal.SIGSTOP)],
)
def test_a_fault_during_a_recovery_costs_one_more_epoch_and_a_starting_rank_goes_on(
    victim: str, fault: signal.Signals
) -> None:
    """Rank 1 is killed. While its replacement loads its weights, `fault` hits rank 0 (the survivor) or the replacement."""

    def check(seconds: float) -> None:
        executor = scripted_executor(name=f"slow:{seconds}")
        try:
            pids = pids_of(executor)
            error = error_after_a_kill(executor, 1)
            results: list[RecoveryResult] = []
            recovery = threading.Thread(target=lambda: results.append(recover(executor, error)))
            recovery.start()
            while (started := executor._ranks[1].process) is None or started.pid == pids[1] or not executor.starting:
                time.sleep(0.01)
            time.sleep(0.8)
            os.kill(pids[0] if victim == "survivor" else started.pid, fault)
            recovery.join(300)
            (result,) = results
            assert (result.epoch, result.replaced) == (2, (0, 1) if victim == "survivor" else (1,))
            assert (pids_of(executor)[1] == started.pid) == (victim == "survivor")
            assert not executor.starting
        finally:
            executor.shutdown()

    with_enough_time(check, first=1.5)  # the fault may come when the weights are loaded already


def test_only_replaced_ranks_use_up_the_recoveries() -> None:
    config = engine_config(tensor_parallel_size=2, backend="mp")
    executor = MultiprocExecutor(
        dataclasses.replace(config, fault_tolerance=FaultToleranceConfig(max_recoveries=1)), SCRIPTED
    )
    try:
        for step_id, fault in enumerate(["raise", "raise", "die"]):
            assert not executor.limits.problem()
            executor.collective_rpc("script", (1, step_id, fault, "bad luck"))
            error = executor.execute_model(plan(step_id), non_block=True).exception(timeout=300)
            assert isinstance(error, RankError)
            recover(executor, error)
        assert executor.limits.problem()
    finally:
        executor.shutdown()


def test_an_argument_that_cannot_be_sent_fails_the_call_alone(executor: MultiprocExecutor) -> None:
    with pytest.raises(
        StepError, match=r"'echo'\) failed on rank 0: CodecError: a value of type set cannot cross a process boundary"
    ):
        executor.collective_rpc("echo", ({1},))
    assert executor.collective_rpc("calls") == [["load_model"]] * 2


@pytest.mark.parametrize("what", ["a set", "an object", "a lambda"])
def test_a_value_that_cannot_be_sent_fails_the_call_alone(executor: MultiprocExecutor, what: str) -> None:
    with pytest.raises(StepError, match=r"'give'\) failed on rank \d: CodecError"):
        executor.collective_rpc("give", (what,))
    executor.check_health()


def test_a_plan_that_cannot_be_sent_fails_its_step_alone(executor: MultiprocExecutor) -> None:
    too_large = new_request(0, [], sampling=dataclasses.replace(SAMPLING, seed=2**70))
    with pytest.raises(StepError, match="can't serialize ints") as caught:
        executor.execute_model(dataclasses.replace(plan(0), new_requests=(too_large,)))
    assert caught.value.step_id == 0
    assert executor.execute_model(plan(1)).step_id == 1


def test_a_rank_that_sends_garbage_is_ended(executor: MultiprocExecutor) -> None:
    pids = pids_of(executor)
    with pytest.raises(WorkerDiedError, match=r"rank 1 .*damaged frame"):
        executor.collective_rpc("babble", (1,))
    assert have_ended([pids[1]])


@pytest.mark.parametrize("what", ["reply", "ready"])
def test_a_rank_that_speaks_for_another_is_ended(executor: MultiprocExecutor, what: str) -> None:
    pids = pids_of(executor)
    with pytest.raises(WorkerDiedError, match=r"rank 1 .*type R\w+"):
        executor.collective_rpc("forge", (1, what))
    assert have_ended([pids[1]])


def test_a_new_process_has_missed_no_pings() -> None:
    """Otherwise it would be lost for the silence of the process before it."""
    heard: list[int] = []
    executor: Any = object.__new__(MultiprocExecutor)
    executor._ranks, executor._pings = [_Rank(), _Rank()], SimpleNamespace(heard=heard.append)
    old = executor._ranks[1]
    executor._forget(1)
    assert old.is_gone and executor._ranks[1] is not old
    assert heard == [1]
