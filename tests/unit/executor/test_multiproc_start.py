"""The start of an executor of processes: in parallel, with names, log lines and no more than the ranks may know."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from inflight.errors import ConfigError, WorkerDiedError
from inflight.executor.multiproc import MultiprocExecutor
from inflight.executor.rank_process import WorkerProcess
from inflight.processes.child_process import wait_for_end
from tests.conformance.configs import engine_config
from tests.support.descriptors import open_descriptors
from tests.support.python_process import environment_of
from tests.unit.executor.processes import pids_of, scripted_executor


def test_the_garbage_collector_of_a_rank_is_on_and_visits_no_libraries(executor: MultiprocExecutor) -> None:
    for is_on, num_frozen in executor.collective_rpc("collector"):
        assert is_on
        assert num_frozen > 10_000


def test_two_workers_load_at_the_same_time() -> None:
    def overlap(seconds: float) -> bool:
        executor = scripted_executor(2, name=f"slow:{seconds}")
        (first_start, first_end), (second_start, second_end) = executor.collective_rpc("load_time")
        executor.shutdown()
        return bool(max(first_start, second_start) < min(first_end, second_end))

    assert any(overlap(seconds) for seconds in (0.5, 5.0, 20.0))  # on a busy machine the processes begin at other times


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
    with pytest.raises(WorkerDiedError, match=r"rank 1 .*process \d+ was killed by SIGKILL"):
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


@pytest.mark.usefixtures("new_interpreters")
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
        environment = environment_of(process.pid)
        process.send_signal(signal.SIGKILL)
        wait_for_end([process], 300.0)
        process.close()
    assert environment.get("NCCL_SOCKET_IFNAME", "") == given


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
            lines = re.findall(rf"^\S+ INFO \[worker tp{rank} pp0\] inflight\.scripted: here I am$", err, re.MULTILINE)
            assert len(lines) == wanted


def test_a_worker_gets_no_descriptor_but_its_own(executor: MultiprocExecutor) -> None:
    with socket.socket() as ours:
        ours.set_inheritable(True)  # as a careless program does
        late = scripted_executor(1)
        pid = pids_of(late)[0]
        targets = list(open_descriptors(pid).values())
        late.shutdown()
    assert sum(target.startswith("socket:") for target in targets) == 1
    assert sum(target.startswith(("pipe:", "anon_inode:")) for target in targets) <= 2  # stdout, stderr


@pytest.mark.usefixtures("new_interpreters")
def test_the_secret_of_the_cluster_is_not_told_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_CLUSTER_TOKEN", "secret")
    monkeypatch.setenv("INFLIGHT_LOG_LEVEL", "WARNING")
    executor = scripted_executor(1)
    environment = environment_of(pids_of(executor)[0])
    executor.shutdown()
    assert "INFLIGHT_CLUSTER_TOKEN" not in environment
    assert environment["INFLIGHT_LOG_LEVEL"] == "WARNING", "but the other variables of this process are"


def test_an_idle_executor_uses_no_processor(executor: MultiprocExecutor) -> None:
    def processor_seconds() -> float:
        ticks = 0
        for pid in (os.getpid(), *pids):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    pids = pids_of(executor)
    executor.collective_rpc("echo", (b"x" * 10_000_000,))  # the sockets were full, and were written to when they could

    def is_idle() -> bool:
        before = processor_seconds()
        time.sleep(1.0)
        return round(processor_seconds() - before, 2) <= 0.02

    assert any(is_idle() for _ in range(10))  # a late thread of another test may cost this process something
