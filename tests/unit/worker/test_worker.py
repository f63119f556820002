"""The real worker where something fails: what it closes, and what it tells the other ranks."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.config.ranks import places_on
from inflight.device.cpu import CpuDevice
from inflight.errors import InvalidRequestError, StepError
from inflight.worker import worker as worker_module
from inflight.worker.worker import Worker
from tests.unit.worker.driven import Driven, make_executor, workers_of, write_small_model
from tests.unit.worker.test_worker_phases import greedy_job, plan_ahead, submit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("worker"))


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[CpuDevice]:
    """All devices that workers make."""
    made: list[CpuDevice] = []

    def make(kind: str, index: int) -> CpuDevice:
        made.append(CpuDevice())
        return made[-1]

    monkeypatch.setattr(worker_module, "get_device", make)
    return made


def reasons_of(worker: Worker) -> list[str]:
    """Why the worker closes its world, from now on."""
    reasons: list[str] = []
    close = worker._world.close
    worker._world.close = lambda reason: reasons.append(reason) or close(reason)  # type: ignore[method-assign, func-returns-value]
    return reasons


class Unmet(Worker):
    def _join(self, rendezvous: object) -> Any:
        raise ConnectionError("nobody answers")


def test_a_worker_that_cannot_start_leaves_no_thread_and_tells_the_others(
    folder: Path, devices: list[CpuDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = make_executor(folder, 1, 1, 3)
    (place,) = places_on([0])
    with pytest.raises(ConnectionError, match="nobody answers"):
        Unmet(driven.executor.config, place, None)
    reasons: list[str] = []

    class Unlinked(Worker):
        def _join(self, rendezvous: object) -> Any:
            group = SimpleNamespace(size=1)
            return SimpleNamespace(tp_rank=0, pp_rank=0, tensor_parallel_group=lambda name: group, close=reasons.append)

    def refuse(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(worker_module, "Pipeline", refuse)
    with pytest.raises(KeyboardInterrupt):
        Unlinked(driven.executor.config, place, None)
    assert reasons == ["it could not start"]
    driven.executor.shutdown()
    assert len(devices) == 3
    for device in devices:
        with pytest.raises(AssertionError, match="after close"):
            device.submit(lambda: None)


def test_a_worker_that_fails_outside_of_steps_leaves_its_groups(folder: Path) -> None:
    driven = make_executor(folder, 1, 1, 3)
    (worker,) = workers_of(driven)
    reasons = reasons_of(worker)
    worker.execute_dummy_batch()
    assert reasons == []

    def fail(num_tokens: int) -> None:
        raise RuntimeError("bad luck")

    worker.runner.dummy_run = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="bad luck"):
        worker.execute_dummy_batch()
    assert reasons == ["it failed"]
    driven.executor.shutdown()


def test_a_worker_that_cannot_meet_the_others_again_tells_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = make_executor(folder, 1, 1, 3)
    (worker,) = workers_of(driven)
    world = SimpleNamespace(tensor_parallel_group=lambda name, into: None, close=lambda reason: reasons.append(reason))
    reasons: list[str] = []
    worker._join = lambda rendezvous: world  # type: ignore[method-assign, return-value, assignment]

    def refuse(*_: object) -> None:
        raise ConnectionError("no link")

    monkeypatch.setattr(worker_module, "Pipeline", refuse)
    with pytest.raises(ConnectionError, match="no link"):
        worker.join_epoch(None)
    assert reasons == ["it could not meet the others"]
    driven.executor.shutdown()
    assert reasons[1:] == ["it was shut down"]


def test_the_end_of_a_worker_ends_its_profiler(folder: Path, tmp_path: Path) -> None:
    """Otherwise no later worker of this process could profile."""
    for _ in range(2):
        driven = make_executor(folder, 1, 1, 3)
        (worker,) = workers_of(driven)
        worker.profile(True, str(tmp_path))
        driven.executor.shutdown()
        with pytest.raises(InvalidRequestError, match="not running"):
            worker._profiler.stop()


class FailingDevice(CpuDevice):
    """`drain` fails: at the call, or when the work's turn comes."""

    fails_at: str = ""

    def drain(self, work: Any) -> Future[Any]:
        if self.fails_at == "call":
            raise RuntimeError("the device has failed")
        if self.fails_at == "turn":
            failed: Future[Any] = Future()
            failed.set_exception(RuntimeError("the device has failed"))
            return failed
        return super().drain(work)


@pytest.mark.parametrize("fails_at", ["call", "turn"])
def test_a_step_whose_device_fails_behind_its_sample_ends_with_that_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    device = FailingDevice()
    monkeypatch.setattr(worker_module, "get_device", lambda kind, index: device)
    driven: Driven = make_executor(folder, 1, 1, 3)
    device.fails_at = fails_at
    (future,) = submit(plan_ahead(driven, [greedy_job("r")]), 1)
    error = future.exception(timeout=300)
    device.fails_at = ""
    driven.executor.shutdown()
    assert isinstance(error, StepError) and "the device has failed" in str(error)
