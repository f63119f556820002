"""The process that waits for the next model. tests/e2e/test_several_models.py loads models by it."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator

import pytest

from inflight.entrypoints.router import spare as spare_module
from inflight.entrypoints.router.spare import ModelSpare
from inflight.processes.child_process import ChildProcess, wait_for_end
from tests.support.processes import children, have_ended
from tests.support.waits import wait_until


@pytest.fixture
def spare(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelSpare]:
    monkeypatch.setattr(spare_module, "_PAUSE_SECONDS", 0.0)
    made = ModelSpare(is_wanted=True)
    yield made
    made.close()


def process_of(spare: ModelSpare) -> ChildProcess:
    assert spare._spare is not None
    return spare._spare.process


def test_a_spare_that_ends_or_is_stopped_is_replaced(spare: ModelSpare, caplog: pytest.LogCaptureFixture) -> None:
    spare.look(is_loading=True)
    assert spare._spare is None
    pids = []
    for number in (signal.SIGKILL, signal.SIGSTOP):
        spare.look(is_loading=False)
        process = process_of(spare)
        wait_until(lambda: spare._spare is not None and spare._spare.is_ready)
        pids += [process.pid, *children(process.pid)]
        assert len(children(process.pid)) == 1  # the one for the engine
        process.send_signal(number)
        with caplog.at_level(logging.WARNING):
            wait_until(lambda: spare.look(is_loading=False) or spare._spare is None)  # type: ignore[func-returns-value]
        assert "the spare process of a model has ended" in caplog.text
    assert have_ended(pids)


def test_a_server_that_ends_leaves_no_spare(spare: ModelSpare) -> None:
    spare.look(is_loading=False)
    process = process_of(spare)
    wait_until(lambda: children(process.pid))
    pids = [process.pid, *children(process.pid)]
    spare.close()
    assert have_ended(pids) and spare._spare is None


def test_without_a_spare_a_new_process_is_started() -> None:
    spare = ModelSpare(is_wanted=False)
    spare.look(is_loading=False)
    assert spare._spare is None
    process = spare.start("inflight: a program", "this", [])
    assert wait_for_end([process], 300.0) == [] and process.exit_code == 0
    process.close()
