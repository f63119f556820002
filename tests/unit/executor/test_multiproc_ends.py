"""The ends of an executor of processes: nothing is left behind."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.errors import ConfigError, WorkerDiedError
from inflight.executor import multiproc
from inflight.executor.multiproc import MultiprocExecutor
from inflight.executor.rank_process import WorkerProcess
from inflight.executor.recovery import recover
from inflight.interface.messages import RpcCall
from inflight.interface.start_up import JoinEpoch, Listening, Ready, StartUp
from inflight.processes.child_process import wait_for_end
from inflight.processes.streams import EXIT_STREAM_ENDED, BlockingStream
from tests.conformance.configs import engine_config, plan
from tests.support.descriptors import num_descriptors
from tests.support.processes import children, exists, have_ended
from tests.unit.executor.processes import SCRIPTED, pids_of, run_script, scripted_executor


def test_shutdown_leaves_no_process_thread_or_descriptor() -> None:
    scripted_executor(1).shutdown()
    descriptors, threads = num_descriptors(), set(threading.enumerate())
    executor = scripted_executor()
    pids = pids_of(executor)
    start = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - start < 60
    assert children(os.getpid()) == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)  # not even a zombie
    assert num_descriptors() == descriptors and set(threading.enumerate()) <= threads


def test_a_replaced_rank_leaves_no_process_or_descriptor(executor: MultiprocExecutor) -> None:
    descriptors = num_descriptors()
    for step_id in range(2):
        executor.collective_rpc("script", (1, step_id, "die", "out of memory"))
        error = executor.execute_model(plan(step_id), non_block=True).exception(timeout=300)
        assert isinstance(error, WorkerDiedError)
        assert recover(executor, error).replaced == (1,)
        assert num_descriptors() == descriptors
        assert sorted(children(os.getpid())) == sorted(pids_of(executor))


def test_spares_that_end_during_shutdown_are_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The I/O thread sees that they have ended, while another thread waits for them and closes them."""
    descriptors = num_descriptors()
    config = engine_config(tensor_parallel_size=2, backend="mp", budget=10.0, name="scripted")
    config = dataclasses.replace(config, fault_tolerance=FaultToleranceConfig(spare_workers=2))
    executor = MultiprocExecutor(config, SCRIPTED)
    stop = multiproc.stop_processes

    def stop_and_let_the_thread_see_it(processes: list[WorkerProcess], seconds: float) -> None:
        stop(processes, seconds)
        for _ in range(3):
            executor._io.run(lambda: None)

    monkeypatch.setattr(multiproc, "stop_processes", stop_and_let_the_thread_see_it)
    executor.shutdown()
    assert children(os.getpid()) == []
    assert num_descriptors() == descriptors


@pytest.mark.parametrize("fault", ["config", "bug", "exit"])
def test_a_failed_start_leaves_nothing(fault: str) -> None:
    descriptors, threads = num_descriptors(), set(threading.enumerate())
    with pytest.raises((ConfigError, WorkerDiedError)):
        scripted_executor(name=f"1:{fault}")
    assert children(os.getpid()) == []
    assert num_descriptors() == descriptors and set(threading.enumerate()) <= threads


def test_shutdown_from_a_callback(executor: MultiprocExecutor) -> None:
    """It runs in the thread that serves the streams, which cannot wait for itself."""
    pids = pids_of(executor)
    done = threading.Event()

    def shut_down(_: object) -> None:
        executor.shutdown()
        done.set()

    executor.collective_rpc("script", (0, 0, "sleep", 0.05))
    executor.execute_model(plan(0), non_block=True).add_done_callback(shut_down)
    assert done.wait(300)
    assert not any(exists(pid) for pid in pids)


ENGINE = f"""
    import sys, time
    from tests.conformance.configs import engine_config, plan
    from inflight.executor.multiproc import MultiprocExecutor
    executor = MultiprocExecutor(engine_config(tensor_parallel_size=2, backend="mp"), "{SCRIPTED}")
    print(*executor.collective_rpc("pid"))
    if sys.argv[1] == "busy":
        executor.collective_rpc("sleep", (None, 3600), non_block=True)
    if sys.argv[1] != "leave":
        time.sleep(3600)
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_no_worker_outlives_an_engine_that_is_killed(state: str) -> None:
    with run_script(ENGINE, state) as engine:
        assert engine.stdout is not None
        pids = [int(pid) for pid in engine.stdout.readline().split()]
        assert len(pids) == 2
        engine.kill()
        assert have_ended(pids)


def test_no_worker_outlives_an_engine_that_forgets_to_shut_down() -> None:
    with run_script(ENGINE, "leave") as engine:
        assert engine.stdout is not None
        pids = [int(pid) for pid in engine.stdout.readline().split()]
        assert engine.wait(300) == 0
        assert have_ended(pids)


@pytest.mark.parametrize("seconds", [0.02, 0.06, 0.15])
def test_no_worker_outlives_an_engine_that_is_killed_while_it_starts(seconds: float) -> None:
    script = "print('begin')\n" + "\n".join(line[4:] for line in ENGINE.split("\n"))
    with run_script(script.replace("import sys, time", "import sys, time"), "idle") as engine:
        assert engine.stdout is not None
        engine.stdout.readline()
        end = time.monotonic() + 300
        while not (pids := children(engine.pid)) and time.monotonic() < end:
            time.sleep(0.005)
        assert pids
        time.sleep(seconds)
        pids = children(engine.pid)
        engine.kill()
        assert have_ended(pids), "a worker that imports sees the end of its stream when it has done so"


def test_a_worker_ends_with_its_engine_also_in_a_call_that_keeps_the_interpreter() -> None:
    """The inbox thread cannot run then: the kernel does it."""
    script = ENGINE.replace(
        "time.sleep(3600)",
        "executor.collective_rpc('freeze', non_block=True); time.sleep(0.2); print('frozen'); time.sleep(3600)",
    )
    with run_script(script, "idle") as engine:
        assert engine.stdout is not None
        pids = [int(pid) for pid in engine.stdout.readline().split()]
        assert engine.stdout.readline() == "frozen\n"
        engine.kill()
        assert have_ended(pids)


def test_a_worker_ends_with_its_stream_while_it_computes() -> None:
    """Its parent lives on, so it is not the kernel that ends it."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = WorkerProcess("inflight: worker tp0 pp0", theirs.fileno())
    stream = BlockingStream(ours)
    config = engine_config(backend="mp")
    title = "inflight: worker tp0 pp0"
    (place,) = config.parallel.places
    stream.send(StartUp(config=config, place=place, title=title, worker_class=SCRIPTED, epoch=0, host="127.0.0.1"))
    assert isinstance(stream.receive(), Listening)
    stream.send(JoinEpoch(epoch=0, rendezvous=None))
    assert stream.receive() == Ready(rank=0)
    stream.send(RpcCall(epoch=0, call_id=0, method="sleep", args=(0, 3600), kwargs={}))
    stream.close()
    assert wait_for_end([process], 300) == []  # its call sleeps for an hour
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
