"""What a process gives to a process that it starts, what it sees of it, and how it ends it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inflight import envs
from inflight.config.openmp import PLACEMENT
from inflight.config.ranks import RankLayout
from inflight.executor.rank_process import WorkerProcess, worker_title
from inflight.processes import child_process as process_module
from inflight.processes.child_process import (
    MAX_STOPPED_LOOKS,
    ChildProcess,
    name_process,
    pause_seconds,
    stop_processes,
    wait_for_end,
    wait_for_first_end,
)


def test_a_process_is_killed_when_it_was_found_stopped_often_enough_in_a_row() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = ChildProcess("inflight: waits", "inflight.executor.worker_main", [theirs.fileno()])
        try:
            for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP):
                process.send_signal(number)
                end = time.monotonic() + 300
                while process.is_stopped is not (number == signal.SIGSTOP):
                    assert time.monotonic() < end
                for _ in range(MAX_STOPPED_LOOKS - 1):
                    process.kill_if_stopped()
                    assert process.is_alive
            process.kill_if_stopped()
            assert not wait_for_end([process], 300)
            assert process.exit_code == -signal.SIGKILL
        finally:
            process.send_signal(signal.SIGKILL)
            wait_for_end([process], 300)
            process.close()


def test_a_stopped_process_is_killed_before_its_time_to_end_is_over(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = ChildProcess("inflight: waits", "inflight.executor.worker_main", [theirs.fileno()])
    process.send_signal(signal.SIGSTOP)
    ours.close()  # otherwise it ends now
    stop_processes([process], 60.0)
    assert process.exit_code == -signal.SIGKILL
    process.close()
    assert "is stopped by a signal, so it is killed" in caplog.text and "in time" not in caplog.text


@pytest.mark.parametrize(
    ("title", "short_name", "shown"),
    [
        ("inflight: engine core", None, "inflight-engine"),
        ("inflight: spare", None, "inflight-spare"),
        ("a: b", "c", "c"),
    ],
)
def test_the_name_that_top_shows(
    monkeypatch: pytest.MonkeyPatch, title: str, short_name: str | None, shown: str
) -> None:
    monkeypatch.setattr("inflight.logs.configure", lambda process, **how: None)
    seen: list[str] = []

    def name() -> None:  # the name is that of a thread
        name_process(title, short_name)
        seen.append(Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip())

    thread = threading.Thread(target=name)
    thread.start()
    thread.join()
    assert seen == [shown]


class Started:
    """Instead of `Popen`: remembers how it was called. Its process is that of the test."""

    calls: list[Started]
    returncode: int | None = None

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self.command, self.options, self.pid = command, options, os.getpid()
        self.calls.append(self)

    def wait(self) -> int | None:
        return self.returncode


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    Started.calls = []
    monkeypatch.setattr(ChildProcess, "fork", None)
    monkeypatch.setattr(subprocess, "Popen", Started)
    return Started.calls


def child(**options: Any) -> ChildProcess:
    process = ChildProcess("title", "some.module", [], **options)
    os.close(process.pidfd)
    return process


def test_a_process_that_went_on_between_two_looks_is_not_stopped_for_long(
    started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = child()
    almost = [True] * (MAX_STOPPED_LOOKS - 1)
    looks = iter([*almost, False, *almost, True])
    monkeypatch.setattr(ChildProcess, "is_stopped", property(lambda self: next(looks)))
    found = [process.stays_stopped() for _ in range(2 * MAX_STOPPED_LOOKS)]
    assert found == [False] * (2 * MAX_STOPPED_LOOKS - 1) + [True]


def test_only_some_processes_get_secrets(started: list[Started], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*envs.API_KEY_VARIABLES, envs.ADMIN_KEY_VARIABLE, "INFLIGHT_CLUSTER_TOKEN", *PLACEMENT):
        monkeypatch.setenv(name, "secret")
    child()
    child(keeps_secrets=True, variables={"SOME_VARIABLE": "1"})
    plain, trusted = (each.options["env"] for each in started)
    assert "secret" not in plain.values() and "SOME_VARIABLE" not in plain
    assert [name for name, value in trusted.items() if value == "secret"] == ["INFLIGHT_CLUSTER_TOKEN"]
    assert trusted["SOME_VARIABLE"] == "1"


def test_a_process_gets_its_streams_and_the_import_path(
    started: list[Started], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/a", "", "/b"])
    os.close(ChildProcess("title", "some.module", [7, 8]).pidfd)
    (call,) = started
    parent = str(os.getpid())
    assert call.command[1:] == ["-P", "-m", "inflight.processes.child", parent, "some.module", "title", "7", "8"]
    assert call.options["pass_fds"] == [7, 8] and call.options["stdin"] == subprocess.DEVNULL
    assert call.options["env"]["PYTHONPATH"] == f"/a:{tmp_path}:/b"  # the child may have another working directory


@pytest.mark.parametrize(
    ("level", "name"),
    [(logging.NOTSET, None), (5, "DEBUG"), (logging.DEBUG, "DEBUG"), (25, "INFO"), (logging.CRITICAL, "ERROR")],
)
def test_a_process_logs_as_much_as_its_parent(
    started: list[Started], monkeypatch: pytest.MonkeyPatch, level: int, name: str | None
) -> None:
    monkeypatch.delenv("INFLIGHT_LOG_LEVEL", raising=False)
    monkeypatch.setattr(logging.getLogger("inflight"), "level", level)
    child()
    assert started[0].options["env"].get("INFLIGHT_LOG_LEVEL") == name


@pytest.mark.parametrize(
    ("is_one_node", "chosen", "interface"),
    [(True, None, "=lo"), (True, "eth7", "eth7"), (False, None, None), (False, "eth7", "eth7")],
)
def test_ranks_of_one_machine_use_the_loopback_interface(
    started: list[Started],
    monkeypatch: pytest.MonkeyPatch,
    is_one_node: bool,
    chosen: str | None,
    interface: str | None,
) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    if chosen is not None:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", chosen)
    os.close(WorkerProcess("title", 7, is_one_node=is_one_node).pidfd)
    assert started[0].options["env"].get("NCCL_SOCKET_IFNAME") == interface


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-9, "was killed by SIGKILL, most likely by the system for lack of memory, or by an operator"),
        (-40, "was killed by signal 40"),
        (3, "ended with exit code 3"),
    ],
)
def test_it_is_said_how_a_process_has_ended(started: list[Started], code: int, text: str) -> None:
    process = child()
    started[0].returncode = code
    assert process.state == f"process {os.getpid()} {text}"
    assert not process.is_alive and process.exit_code == code


@pytest.mark.parametrize(("kills", "is_certain"), [(0, False), (1, True)])
def test_memory_is_named_as_the_cause_of_a_kill_from_outside(
    started: list[Started], monkeypatch: pytest.MonkeyPatch, kills: int, is_certain: bool
) -> None:
    monkeypatch.setattr(process_module, "count_memory_kills", lambda: 7)
    process = child()
    monkeypatch.setattr(process_module, "count_memory_kills", lambda: 7 + kills)
    started[0].returncode = -9
    assert "memory" in process.state
    assert ("the kernel has ended a process" in process.state) is is_certain
    process._was_killed = True  # by this program, which had another reason
    assert "memory" not in process.state


@pytest.mark.parametrize(
    ("letters", "may_run"), [("SS", False), ("SR", True), ("DS", True), ("RR", True), ("ST", False), ("IZ", False)]
)
def test_one_thread_that_can_run_is_enough(
    started: list[Started], monkeypatch: pytest.MonkeyPatch, letters: str, may_run: bool
) -> None:
    process, left = child(), iter(letters)
    monkeypatch.setattr(process_module, "_status_letter", lambda stat: next(left, "S"))
    ended = threading.Event()
    second = threading.Thread(target=ended.wait)
    second.start()
    assert process.may_run is may_run
    ended.set()
    second.join()
    process.pid = 2**30  # there is no such process, so nothing is known of it
    assert process.may_run


@pytest.mark.parametrize(("letter", "text"), [("S", "is alive"), ("T", "is stopped by a signal"), ("t", "is alive")])
def test_it_is_said_what_a_process_does(
    started: list[Started], monkeypatch: pytest.MonkeyPatch, letter: str, text: str
) -> None:
    process = ChildProcess("title", "some.module", [])
    monkeypatch.setattr(process_module, "_status_letter", lambda stat: letter)
    assert process.state == f"process {os.getpid()} {text}"
    os.close(process.pidfd)


def test_a_process_that_cannot_be_watched_is_ended(started: list[Started], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(pid: int) -> int:
        raise OSError("too many open files")

    ends: list[str] = []
    monkeypatch.setattr(os, "pidfd_open", no_descriptor)
    monkeypatch.setattr(Started, "kill", lambda self: ends.append("kill"), raising=False)
    monkeypatch.setattr(Started, "wait", lambda self: ends.append("wait"))
    with pytest.raises(OSError, match="too many open files"):
        ChildProcess("title", "some.module", [])
    assert ends == ["kill", "wait"]


def test_a_process_that_does_not_end_is_left_and_named(
    started: list[Started], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process = child()
    process.pid = 2**30  # there is no such process
    assert not process.is_stopped
    closed: list[int] = []
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(process_module, "os", SimpleNamespace(close=closed.append))
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *given: sent.append(given))
    monkeypatch.setattr(process_module, "wait", lambda descriptors, seconds: [])
    process.send_signal(signal.SIGTERM)
    process.close()
    assert "title" in caplog.text and "left running" in caplog.text
    caplog.clear()
    started[0].returncode = 0
    process.send_signal(signal.SIGTERM)  # does nothing
    process.close()
    assert not caplog.records
    assert closed == [process.fileno()] * 2 and sent == [(process.pidfd, signal.SIGTERM)]


class Mortal:
    """A process that ends at one of these signals, or after `num_looks` looks."""

    def __init__(self, *deadly: int, num_looks: int | None = None) -> None:
        self.title, self.pid, self.signals = "mortal", 7, list[int]()
        self._deadly, self._num_looks = deadly, num_looks
        self.pidfd, self._life = os.pipe()  # the end of the pipe is readable when the other end is closed
        self._is_alive = True
        if num_looks is not None:
            os.close(self._life)

    @property
    def is_alive(self) -> bool:
        if self._num_looks is not None:
            self._num_looks -= 1
            self._is_alive = self._num_looks > 0
        return self._is_alive

    def kill_if_stopped(self) -> None:
        pass

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        if number in self._deadly:
            self._is_alive = False
            os.close(self._life)


Mortals = Callable[..., list[Any]]


@pytest.fixture
def mortals() -> Iterator[Mortals]:
    made: list[Mortal] = []

    def make(*found: Mortal) -> list[Any]:
        made.extend(found)
        return list(found)

    yield make
    for each in made:
        os.close(each.pidfd)


def test_the_first_end_is_enough(mortals: Mortals) -> None:
    wait_for_first_end(mortals(Mortal(15), Mortal(num_looks=1)), 300.0)
    wait_for_first_end(mortals(Mortal(15)), 0.0)


@pytest.mark.parametrize(("num_failed", "seconds"), [(1, 0.2), (2, 0.5), (5, 5.0), (6, 5.0), (100, 5.0)])
def test_tries_to_start_a_process_follow_more_and_more_slowly(num_failed: int, seconds: float) -> None:
    assert pause_seconds(num_failed) == seconds


def test_all_ends_are_waited_for(mortals: Mortals) -> None:
    """Several processes may end at different times."""
    assert wait_for_end(mortals(Mortal(num_looks=2), Mortal(num_looks=5), Mortal(num_looks=1)), 60.0) == []
    living = mortals(Mortal(num_looks=2), Mortal(15))
    assert wait_for_end(living, 0.0) == living


def test_a_process_that_ignores_sigterm_is_killed(mortals: Mortals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "SIGTERM_SECONDS", 0.01)
    processes = mortals(Mortal(num_looks=1), Mortal(signal.SIGTERM), Mortal(signal.SIGKILL))
    stop_processes(processes, 0.0)
    assert [each.signals for each in processes] == [[], [signal.SIGTERM], [signal.SIGTERM, signal.SIGKILL]]


def test_a_worker_is_named_after_its_place() -> None:
    assert [worker_title(RankLayout(2, 3), rank) for rank in (1, 4)] == [
        "inflight: worker tp1 pp0",
        "inflight: worker tp0 pp2",
    ]


@pytest.mark.parametrize("title", ["short", "longer than the arguments " * 3])
def test_the_title_replaces_the_arguments_and_nothing_behind_them(title: str) -> None:
    """Behind the arguments the kernel keeps the environment. `ps` would show it, if no zero byte came before it."""
    script = (
        "import os, sys; from inflight.processes.command_line import show_title; show_title(os.environ['TITLE']);"
        "print(open('/proc/self/cmdline').read().rstrip(chr(0)).split(chr(0))[3:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "first argument", "second"],
        env={**os.environ, "TITLE": title},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str([title[: len("first argument second")]])
