"""Processes of ranks are watched from their first moment on: while they start, and while they wait as spares."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.errors import RankError, WorkerDiedError
from inflight.executor import multiproc
from inflight.executor.multiproc import MultiprocExecutor
from inflight.executor.recovery import recover
from tests.conformance.configs import engine_config
from tests.support.enough_time import with_enough_time
from tests.support.processes import children
from tests.support.waits import wait_until
from tests.unit.executor.processes import SCRIPTED, pids_of


def executor_of(num_ranks: int = 2, *, name: str = "scripted", **fields: Any) -> MultiprocExecutor:
    config = engine_config(tensor_parallel_size=num_ranks, backend="mp", name=name)
    return MultiprocExecutor(dataclasses.replace(config, fault_tolerance=FaultToleranceConfig(**fields)), SCRIPTED)


@contextlib.contextmanager
def shut_down(executor: MultiprocExecutor) -> Iterator[MultiprocExecutor]:
    try:
        yield executor
    finally:
        executor.shutdown()


def test_a_rank_that_is_stopped_while_it_starts_for_the_first_time_is_replaced() -> None:
    def check(seconds: float) -> None:
        made: list[MultiprocExecutor] = []
        known = set(children(os.getpid()))
        thread = threading.Thread(target=lambda: made.append(executor_of(name=f"slow:{seconds}")))
        thread.start()
        stopped = min(wait_until(lambda: new if len(new := set(children(os.getpid())) - known) >= 2 else None))
        os.kill(stopped, signal.SIGSTOP)
        thread.join(300)
        with shut_down(made[0]) as executor:
            assert stopped not in pids_of(executor) and executor.meeting.epoch == 1
            executor.check_health()

    with_enough_time(check, first=2.0)  # it may have started before it is stopped


def test_without_fault_tolerance_a_start_ends_with_its_first_error() -> None:
    with pytest.raises(WorkerDiedError, match="a bug in load_model"):
        executor_of(name="1:bug", enabled=False)


def spare_pid(executor: MultiprocExecutor, other_than: int = 0) -> int:
    """The I/O thread changes the spares, so they are copied in one step."""
    return min(wait_until(lambda: {process.pid for process, _ in list(executor._spares)} - {other_than}))


def test_a_spare_process_that_is_stopped_is_replaced_in_peace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(multiproc, "SPARE_SECONDS", 0.1)
    with shut_down(executor_of(spare_workers=1)) as executor:
        stopped = spare_pid(executor)
        os.kill(stopped, signal.SIGSTOP)
        spare_pid(executor, other_than=stopped)
        assert "is stopped by a signal, so it is killed" in caplog.text
        assert not executor.limits.times


def test_a_spare_process_that_is_stopped_does_not_become_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if it was stopped just now, so that nobody has noticed."""
    monkeypatch.setattr(multiproc, "PING_SECONDS", 3600.0)
    with shut_down(executor_of(spare_workers=1)) as executor:
        stopped = spare_pid(executor)
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: executor._spares[0][0].is_stopped)
        os.kill(pids_of(executor)[1], signal.SIGKILL)
        result = recover(executor, wait_until(lambda: death_of(executor)))
        assert (result.epoch, result.replaced) == (1, (1,))
        assert stopped not in pids_of(executor)


def death_of(executor: MultiprocExecutor) -> RankError | None:
    try:
        executor.raise_if_lost()
    except RankError as error:
        return error
    return None


class Shortage:
    """While it lasts, no process can be started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lasts, self.num_refused = False, 0
        self._start = MultiprocExecutor._new_process
        monkeypatch.setattr(MultiprocExecutor, "_new_process", lambda executor, title: self._new(executor, title))

    def _new(self, executor: MultiprocExecutor, title: str) -> object:
        if self.lasts:
            self.num_refused += 1
            raise OSError(12, "Cannot allocate memory")
        return self._start(executor, title)


def test_a_spare_process_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiproc, "SPARE_SECONDS", 0.05)
    shortage = Shortage(monkeypatch)
    with shut_down(executor_of(spare_workers=1)) as executor:
        shortage.lasts = True
        os.kill(spare_pid(executor), signal.SIGKILL)
        wait_until(lambda: shortage.num_refused >= 2)
        assert executor.num_spares == 0
        shortage.lasts = False
        wait_until(lambda: executor.num_spares == 1)


def test_a_rank_that_cannot_be_started_again_at_once_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortage costs its duration, and one recovery."""
    shortage = Shortage(monkeypatch)
    with shut_down(executor_of(max_recoveries=1)) as executor:
        survivor, lost = pids_of(executor)
        os.kill(lost, signal.SIGKILL)
        error = wait_until(lambda: death_of(executor))
        shortage.lasts = True

        def end_of_shortage() -> None:
            wait_until(lambda: shortage.num_refused >= 2)
            shortage.lasts = False

        thread = threading.Thread(target=end_of_shortage)
        thread.start()
        result = recover(executor, error)
        thread.join()
        assert result.replaced == (1,) and pids_of(executor)[0] == survivor
        assert len(executor.limits.times) == 1


def test_the_limit_of_recoveries_counts_those_of_earlier_engine_cores() -> None:
    with shut_down(executor_of(1, max_recoveries=2)) as executor:
        executor.limits.add_earlier([time.monotonic()])
        assert not executor.limits.problem()
        executor.limits.add_earlier([time.monotonic()])
        assert "2 recoveries" in executor.limits.problem()
