"""What only the executor of processes has: real signals, nothing left behind, names, logs and start-up in parallel."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.errors import ConfigError, RankError, StepError, StepTimeoutError, WorkerDiedError
from inflight.executor.multiproc import MultiprocExecutor
from inflight.executor.process import WorkerProcess, wait_for_end
from inflight.executor.recovery import RecoveryResult
from inflight.executor.transport import EXIT_STREAM_ENDED, BlockingStream
from inflight.interface.messages import RpcCall
from inflight.interface.request import ResolvedSampling
from inflight.interface.start_up import BeginEpoch, JoinEpoch, Listening, Ready, StartUp
from inflight.interface.step import NewRequestData
from inflight.sampling_params import SamplingParams
from tests.conformance.configs import engine_config, plan
from tests.unit.executor.processes import SCRIPTED, children, exists, have_ended, run_script, scripted_executor


@pytest.fixture
def executor() -> Iterator[MultiprocExecutor]:
    executor = scripted_executor()
    yield executor
    executor.shutdown()


def pids_of(executor: MultiprocExecutor) -> list[int]:
    pids: list[int] = executor.collective_rpc("pid")
    return pids


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- deaths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_sigkill_is_known_within_100_ms(executor: MultiprocExecutor, rank: int) -> None:
    pids = pids_of(executor)
    executor.collective_rpc("script", (None, 0, "sleep", 5))
    future = executor.execute_model(plan(0), non_block=True)
    start = time.monotonic()
    os.kill(pids[rank], signal.SIGKILL)
    error = future.exception(timeout=5)
    seconds = time.monotonic() - start
    assert isinstance(error, WorkerDiedError)
    assert seconds < 0.1
    assert (error.rank, error.step_id, error.request_ids) == (rank, 0, ("req-a", "req-b"))
    assert f"rank {rank} died (process {pids[rank]} was killed by SIGKILL) before it answered step 0" in str(error)
    with pytest.raises(WorkerDiedError, match="is gone"):
        executor.check_health()


def test_a_death_while_idle_is_known_too(executor: MultiprocExecutor, caplog: pytest.LogCaptureFixture) -> None:
    pid = pids_of(executor)[1]
    os.kill(pid, signal.SIGSEGV)
    have_ended([pid], 5)
    time.sleep(0.1)  # the time in which it has to be known
    error = executor.execute_model(plan(0), non_block=True).exception(timeout=0)
    assert isinstance(error, WorkerDiedError)
    assert "killed by SIGSEGV" in str(error)
    assert sum("rank 1 died" in record.getMessage() for record in caplog.records) == 1


def test_an_exit_names_its_code(executor: MultiprocExecutor) -> None:
    with pytest.raises(WorkerDiedError, match=r"rank 1 died \(process \d+ ended with exit code 1\)"):
        executor.collective_rpc("die", (1, "I leave"))


def test_what_was_sent_before_a_death_is_not_lost(executor: MultiprocExecutor) -> None:
    """The answer to the first call is still in the stream when the process is gone."""
    pids = pids_of(executor)
    is_blocked = threading.Event()

    def read_nothing_until_all_are_dead() -> None:
        is_blocked.set()
        have_ended(pids, 5)

    executor._io.call_soon(read_nothing_until_all_are_dead)
    assert is_blocked.wait(5)
    answered = executor.collective_rpc("echo", (b"x" * 80_000,), non_block=True)
    executor.collective_rpc("die", (None, "I leave"), non_block=True)
    assert [value[0] for value in answered.result(timeout=10)] == [0, 1]


def test_a_stopped_rank_times_out_and_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    executor = scripted_executor(budget=0.5)
    pids = pids_of(executor)
    os.kill(pids[1], signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(StepTimeoutError) as caught:
        executor.execute_model(plan(3))
    assert time.monotonic() - start < 2.5
    assert (caught.value.rank, caught.value.step_id, caught.value.request_ids) == (1, 3, ("req-a", "req-b"))
    assert f"from rank 1 (process {pids[1]} is stopped by a signal; does not say what it is doing; " in str(
        caught.value
    )
    start = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - start < 3
    assert not any(exists(pid) for pid in pids)
    assert "SIGKILL" in caplog.text


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
        assert executor.collective_rpc("pid", unique_reply_rank=1, timeout=5) == pids[1]
        assert time.monotonic() - start < 3
        os.kill(pids[0], signal.SIGCONT)
        assert pids_of(executor) == pids
    finally:
        executor.shutdown()


def test_a_process_that_has_ended_is_seen_by_all_threads_at_once() -> None:
    """`Popen.poll` says None to one thread while another one asks; so a process could be taken for one that hangs."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = WorkerProcess("inflight: worker tp0 pp0", theirs.fileno())
        assert wait_for_end([process], 0.0) == [process]
        assert process.exit_code is None
        process.send_signal(signal.SIGKILL)
        with process._popen._waitpid_lock:  # type: ignore[attr-defined]
            assert wait_for_end([process], 5.0) == []
        assert process.exit_code == -signal.SIGKILL
        process.send_signal(signal.SIGTERM)  # does nothing
        process.close()


# -- recoveries ------------------------------------------------------------------------------------------------------


def test_the_death_of_a_replaced_process_is_not_charged_to_the_new_one(executor: MultiprocExecutor) -> None:
    pids = pids_of(executor)
    assert executor.begin_epoch(StepError("a step failed", rank=0)) == set()
    executor.send(0, BeginEpoch(epoch=1))
    executor.replace_rank(1)  # kills a process that lives, and is ready
    executor.join_epoch(time.monotonic() + 10)
    assert not executor.meeting.failed
    assert pids_of(executor)[0] == pids[0]
    assert executor.execute_model(plan(0)).step_id == 0


def error_after_a_kill(executor: MultiprocExecutor, *ranks: int) -> RankError:
    pids = pids_of(executor)
    future = executor.collective_rpc("sleep", (None, 0.3), non_block=True)
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)
    error = future.exception(timeout=5)
    assert isinstance(error, RankError)
    return error


def test_two_ranks_that_are_killed_at_once_cost_one_epoch(executor: MultiprocExecutor) -> None:
    result = executor.recover(error_after_a_kill(executor, 1, 0))
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
    executor = scripted_executor(name="slow:1.5")
    try:
        pids = pids_of(executor)
        error = error_after_a_kill(executor, 1)
        results: list[RecoveryResult] = []
        recovery = threading.Thread(target=lambda: results.append(executor.recover(error)))
        recovery.start()
        while (started := executor._ranks[1].process) is None or started.pid == pids[1] or not executor.starting:
            time.sleep(0.01)
        time.sleep(0.8)
        os.kill(pids[0] if victim == "survivor" else started.pid, fault)
        recovery.join(30)
        (result,) = results
        assert (result.epoch, result.replaced) == (2, (0, 1) if victim == "survivor" else (1,))
        assert (pids_of(executor)[1] == started.pid) == (victim == "survivor")
        assert not executor.starting
    finally:
        executor.shutdown()


def test_the_garbage_collector_of_a_rank_is_on_and_visits_no_libraries(executor: MultiprocExecutor) -> None:
    for is_on, num_frozen in executor.collective_rpc("collector"):
        assert is_on
        assert num_frozen > 10_000


# -- nothing is left behind ------------------------------------------------------------------------------------------


def test_shutdown_leaves_no_process_thread_or_descriptor() -> None:
    scripted_executor(1).shutdown()
    gc.collect()
    descriptors, threads = num_descriptors(), threading.active_count()
    executor = scripted_executor()
    pids = pids_of(executor)
    start = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - start < 2
    assert children(os.getpid()) == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)  # not even a zombie
    assert (num_descriptors(), threading.active_count()) == (descriptors, threads)


def test_a_replaced_rank_leaves_no_process_or_descriptor(executor: MultiprocExecutor) -> None:
    descriptors = num_descriptors()
    for step_id in range(2):
        executor.collective_rpc("script", (1, step_id, "die", "out of memory"))
        error = executor.execute_model(plan(step_id), non_block=True).exception(timeout=10)
        assert isinstance(error, WorkerDiedError)
        assert executor.recover(error).replaced == (1,)
        assert num_descriptors() == descriptors
        assert sorted(children(os.getpid())) == sorted(pids_of(executor))


def test_only_replaced_ranks_use_up_the_recoveries() -> None:
    config = engine_config(tensor_parallel_size=2, backend="mp")
    executor = MultiprocExecutor(
        dataclasses.replace(config, fault_tolerance=FaultToleranceConfig(max_recoveries=1)), SCRIPTED
    )
    try:
        for step_id, fault in enumerate(["raise", "raise", "die"]):
            assert not executor.recovery_problem
            executor.collective_rpc("script", (1, step_id, fault, "bad luck"))
            error = executor.execute_model(plan(step_id), non_block=True).exception(timeout=10)
            assert isinstance(error, RankError)
            executor.recover(error)
        assert executor.recovery_problem
    finally:
        executor.shutdown()


@pytest.mark.parametrize("fault", ["config", "bug", "exit"])
def test_a_failed_start_leaves_nothing(fault: str) -> None:
    descriptors, threads = num_descriptors(), threading.active_count()
    with pytest.raises((ConfigError, WorkerDiedError)):
        scripted_executor(name=f"1:{fault}")
    gc.collect()
    assert children(os.getpid()) == []
    assert (num_descriptors(), threading.active_count()) == (descriptors, threads)


def test_shutdown_from_a_callback(executor: MultiprocExecutor) -> None:
    """It runs in the thread that serves the streams, which cannot wait for itself."""
    pids = pids_of(executor)
    done = threading.Event()

    def shut_down(_: object) -> None:
        executor.shutdown()
        done.set()

    executor.collective_rpc("script", (0, 0, "sleep", 0.05))
    executor.execute_model(plan(0), non_block=True).add_done_callback(shut_down)
    assert done.wait(5)
    assert not any(exists(pid) for pid in pids)


ENGINE = f"""
    import sys, time
    from tests.conformance.configs import engine_config, plan
    from inflight.executor.multiproc import MultiprocExecutor
    executor = MultiprocExecutor(engine_config(tensor_parallel_size=2, backend="mp"), "{SCRIPTED}")
    print(*executor.collective_rpc("pid"))
    if sys.argv[1] == "busy":
        executor.collective_rpc("sleep", (None, 60), non_block=True)
    if sys.argv[1] != "leave":
        time.sleep(60)
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_no_worker_outlives_an_engine_that_is_killed(state: str) -> None:
    with run_script(ENGINE, state) as engine:
        assert engine.stdout is not None
        pids = [int(pid) for pid in engine.stdout.readline().split()]
        assert len(pids) == 2
        engine.kill()
        assert have_ended(pids, 2)


def test_no_worker_outlives_an_engine_that_forgets_to_shut_down() -> None:
    with run_script(ENGINE, "leave") as engine:
        assert engine.stdout is not None
        pids = [int(pid) for pid in engine.stdout.readline().split()]
        assert engine.wait(10) == 0
        assert have_ended(pids, 2)


@pytest.mark.parametrize("seconds", [0.02, 0.06, 0.15])
def test_no_worker_outlives_an_engine_that_is_killed_while_it_starts(seconds: float) -> None:
    script = "print('begin')\n" + "\n".join(line[4:] for line in ENGINE.split("\n"))
    with run_script(script.replace("import sys, time", "import sys, time"), "idle") as engine:
        assert engine.stdout is not None
        engine.stdout.readline()
        end = time.monotonic() + 10
        while not (pids := children(engine.pid)) and time.monotonic() < end:
            time.sleep(0.005)
        assert pids
        time.sleep(seconds)
        pids = children(engine.pid)
        engine.kill()
        assert have_ended(pids, 2)


def test_a_worker_ends_with_its_engine_also_in_a_call_that_keeps_the_interpreter() -> None:
    """The inbox thread cannot run then: the kernel does it."""
    script = ENGINE.replace(
        "time.sleep(60)",
        "executor.collective_rpc('freeze', non_block=True); time.sleep(0.2); print('frozen'); time.sleep(60)",
    )
    with run_script(script, "idle") as engine:
        assert engine.stdout is not None
        pids = [int(pid) for pid in engine.stdout.readline().split()]
        assert engine.stdout.readline() == "frozen\n"
        engine.kill()
        assert have_ended(pids, 2)


def test_a_worker_ends_with_its_stream_while_it_computes() -> None:
    """Its parent lives on, so it is not the kernel that ends it."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = WorkerProcess("inflight: worker tp0 pp0", theirs.fileno())
    stream = BlockingStream(ours)
    config = engine_config(backend="mp")
    title = "inflight: worker tp0 pp0"
    stream.send(StartUp(config=config, rank=0, title=title, worker_class=SCRIPTED, epoch=0, host="127.0.0.1"))
    assert isinstance(stream.receive(), Listening)
    stream.send(JoinEpoch(epoch=0, rendezvous=None))
    assert stream.receive() == Ready(rank=0)
    stream.send(RpcCall(epoch=0, call_id=0, method="sleep", args=(0, 60), kwargs={}))
    stream.close()
    assert wait_for_end([process], 2) == []
    assert process.exit_code == EXIT_STREAM_ENDED
    process.close()


def test_workers_live_on_when_the_thread_that_made_the_executor_ends() -> None:
    made: list[MultiprocExecutor] = []
    thread = threading.Thread(target=lambda: made.append(scripted_executor(1)))
    thread.start()
    thread.join()
    time.sleep(0.05)
    made[0].check_health()
    made[0].shutdown()


# -- start-up --------------------------------------------------------------------------------------------------------


def test_two_workers_load_at_the_same_time() -> None:
    executor = scripted_executor(2, name="slow:0.5")
    (first_start, first_end), (second_start, second_end) = executor.collective_rpc("load_time")
    executor.shutdown()
    assert max(first_start, second_start) < min(first_end, second_end)


def test_the_traceback_of_a_failed_start_reaches_the_user_once(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerDiedError) as caught:
        scripted_executor(name="1:bug")
    assert str(caught.value).count("KeyError: 'a bug in load_model'") == 2  # the message, and the end of the traceback
    assert str(caught.value).count("Traceback") == 1
    assert capfd.readouterr().err == ""
    with pytest.raises(ConfigError, match="no such model") as also_caught:
        scripted_executor(name="1:config")
    assert str(also_caught.value) == "rank 1: no such model"
    (note,) = also_caught.value.__notes__
    assert note.startswith("On rank 1:\nTraceback")
    assert "in load_model" in note


@pytest.mark.parametrize(
    ("worker_class", "text"),
    [
        ("tests.no_such_module:Worker", "ModuleNotFoundError: No module named 'tests.no_such_module'"),
        ("tests.conformance.scripted_worker:NoSuchWorker", "AttributeError: .*NoSuchWorker"),
        ("tests.unit.executor.broken_worker:Worker", "ImportError: libnothing.so is missing"),
    ],
)
def test_a_worker_that_cannot_be_imported(worker_class: str, text: str) -> None:
    with pytest.raises(WorkerDiedError, match=f"rank 0 could not start: {text}") as caught:
        MultiprocExecutor(engine_config(backend="mp"), worker_class)
    assert "import_module" in caught.value.worker_traceback


def test_a_process_that_dies_while_it_starts() -> None:
    with pytest.raises(WorkerDiedError, match=r"rank 1 could not start: process \d+ was killed by SIGKILL"):
        scripted_executor(name="1:kill")


def test_ranks_are_told_where_to_meet(executor: MultiprocExecutor) -> None:
    first, second = executor.collective_rpc("place")
    assert first == second
    addresses, epoch, seconds = first
    assert (epoch, seconds) == (0, 10.0)
    for host, port in addresses:
        assert host == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):  # each rank has its socket, and nobody else can come before it
            socket.create_server((host, port))
    alone = scripted_executor(1)
    assert alone.collective_rpc("place") == [None]
    alone.shutdown()


@pytest.mark.parametrize(
    ("chosen", "is_one_node", "given"), [("", True, "=lo"), ("eth7", True, "eth7"), ("", False, "")]
)
def test_nccl_of_one_node_listens_on_loopback_only(
    monkeypatch: pytest.MonkeyPatch, chosen: str, is_one_node: bool, given: str
) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    if chosen:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", chosen)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = WorkerProcess("inflight: worker tp0 pp0", theirs.fileno(), is_one_node=is_one_node)
        while not (text := Path(f"/proc/{process.pid}/environ").read_text()):
            time.sleep(0.001)  # the kernel shows nothing for a moment in which the program begins
        environment = dict(line.partition("=")[::2] for line in text.split("\0"))
        process.send_signal(signal.SIGKILL)
        wait_for_end([process], 5.0)
        process.close()
    assert environment.get("NCCL_SOCKET_IFNAME", "") == given


# -- what cannot cross -------------------------------------------------------------------------------------------------


def test_an_argument_that_cannot_be_sent_fails_the_call_alone(executor: MultiprocExecutor) -> None:
    with pytest.raises(
        StepError, match=r"'echo'\) failed on rank 0: CodecError: a value of type set cannot cross a process boundary"
    ):
        executor.collective_rpc("echo", ({1},))
    assert executor.collective_rpc("calls") == [["load_model"]] * 2


@pytest.mark.parametrize("what", ["a set", "an object", "a lambda"])
def test_a_value_that_cannot_be_sent_fails_the_call_alone(executor: MultiprocExecutor, what: str) -> None:
    with pytest.raises(StepError, match=r"'give'\) failed on rank \d: CodecError: .*cannot cross a process boundary"):
        executor.collective_rpc("give", (what,))
    executor.check_health()


def test_a_plan_that_cannot_be_sent_fails_its_step_alone(executor: MultiprocExecutor) -> None:
    no_tokens = np.empty(0, dtype=np.int32)
    too_large = NewRequestData(
        request_id="r",
        slot=0,
        token_ids=no_tokens,
        num_prompt_tokens=0,
        block_ids=(),
        sampling=ResolvedSampling(params=SamplingParams(), seed=2**70, max_tokens=1),
    )
    with pytest.raises(StepError, match="can't serialize ints") as caught:
        executor.execute_model(dataclasses.replace(plan(0), new_requests=(too_large,)))
    assert caught.value.step_id == 0
    assert executor.execute_model(plan(1)).step_id == 1


def test_a_rank_that_sends_garbage_is_ended(executor: MultiprocExecutor) -> None:
    pids = pids_of(executor)
    with pytest.raises(WorkerDiedError, match=r"rank 1 died \(it sent a damaged frame: .*does not speak our protocol"):
        executor.collective_rpc("babble", (1,))
    assert have_ended([pids[1]], 2)


@pytest.mark.parametrize("what", ["reply", "ready"])
def test_a_rank_that_speaks_for_another_is_ended(executor: MultiprocExecutor, what: str) -> None:
    pids = pids_of(executor)
    with pytest.raises(
        WorkerDiedError, match=r"rank 1 died \(it sent a message of type R\w+, which is not allowed now"
    ):
        executor.collective_rpc("forge", (1, what))
    assert have_ended([pids[1]], 2)


# -- names and logs ----------------------------------------------------------------------------------------------------


def test_workers_carry_their_names(executor: MultiprocExecutor) -> None:
    for rank, pid in enumerate(pids_of(executor)):
        arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        assert f"inflight: worker tp{rank} pp0" in arguments
        assert Path(f"/proc/{pid}/comm").read_text() == f"inflight-tp{rank}pp0\n"


def test_log_lines_carry_the_rank_once(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for level, wanted in (("INFO", 1), ("WARNING", 0)):
        monkeypatch.setenv("INFLIGHT_LOG_LEVEL", level)
        executor = scripted_executor()
        executor.collective_rpc("log", ("here I am",))
        executor.shutdown()
        err = capfd.readouterr().err
        for rank in range(2):
            lines = re.findall(rf"^INFO \[worker tp{rank} pp0\] inflight\.scripted: here I am$", err, re.MULTILINE)
            assert len(lines) == wanted


def test_a_worker_gets_no_descriptor_but_its_own(executor: MultiprocExecutor) -> None:
    with socket.socket() as ours:
        ours.set_inheritable(True)  # as a careless program does
        late = scripted_executor(1)
        pid = pids_of(late)[0]
        targets = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        late.shutdown()
    assert sum(target.startswith("socket:") for target in targets) == 1
    assert sum(target.startswith(("pipe:", "anon_inode:")) for target in targets) <= 2  # stdout, stderr


def test_the_secret_of_the_cluster_is_not_told_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_CLUSTER_TOKEN", "secret")
    executor = scripted_executor(1)
    environment = Path(f"/proc/{pids_of(executor)[0]}/environ").read_text()
    executor.shutdown()
    assert "INFLIGHT_CLUSTER_TOKEN" not in environment


def test_an_idle_executor_uses_no_processor(executor: MultiprocExecutor) -> None:
    def processor_seconds() -> float:
        ticks = 0
        for pid in (os.getpid(), *pids):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    pids = pids_of(executor)
    executor.collective_rpc("echo", (b"x" * 10_000_000,))  # the sockets were full, and were written to when they could
    before = processor_seconds()
    time.sleep(1.0)
    assert processor_seconds() - before <= 0.02
