"""`EngineCore` when a step or a rank fails, and nothing may be recovered."""

from __future__ import annotations

import pytest

from inflight.config.kv_transfer import KVTransferConfig
from inflight.engine.core.step_loop import CoreListener
from inflight.errors import RankError, StepError, StepTimeoutError, WorkerDiedError
from inflight.interface.request import FinishReason
from inflight.scheduler.kv_transfers import KVTransfers
from tests.support.mock_engine import VOCAB_SIZE, MockEngine
from tests.unit.engine.core.core_cases import assert_dead, fail_on


def test_a_step_that_fails_is_logged_once_with_everything_that_was_known(caplog: pytest.LogCaptureFixture) -> None:
    """It is named, also where it is not the oldest in flight: its error is there before the oldest has been answered."""
    engine = MockEngine(depth=3)
    engine.add("a", [1] * 5, 20)
    engine.step()
    engine.executor.failing[2] = True
    engine.step()
    assert not caplog.records
    with pytest.raises(StepError, match="injected"):
        engine.step()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("inflight.engine.core.engine_core", "ERROR")
    for part in (
        "injected\nThe plan was:\nstep 2: 1 requests, 1 tokens\n  a: slot 0, tokens [6, 7), samples",
        "1 requests run, 0 wait;",
        "KV blocks are free; 3 steps in flight",
        "a: RUNNING, slot 0, 5 prompt tokens, 2 emitted, 9 of 10 planned, 3 blocks, in 3 steps in flight",
        "Steps in flight: 2, 3, 4",
    ):
        assert part in record.getMessage()
    engine.run()
    assert len(caplog.records) == 1


def test_a_defect_of_the_scheduler_ends_in_the_same_place(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = MockEngine(depth=2)
    engine.add("a", [1] * 5, 20)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "update_from_output", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.core.step()
    assert "modulo by zero" in caplog.text and "step 1: 1 requests" in caplog.text and "Traceback" in caplog.text
    engine.run()


def test_a_failure_of_a_step_that_is_left_over_is_nobodys(caplog: pytest.LogCaptureFixture) -> None:
    """Its requests have ended: the next ones, planned behind it, are computed again, and no caller hears of it."""
    engine = MockEngine(depth=2)
    engine.add("a", [1] * 5, 10, stop=frozenset(range(VOCAB_SIZE)))
    engine.step()
    assert engine.finished == {"a": FinishReason.STOP}
    assert len(engine.core._in_flight) == 1
    engine.executor.failing[1] = True
    engine.add("b", [2] * 5, 3)
    engine.run()
    assert "step 1: 1 requests" in caplog.text
    assert engine.finished["b"] is FinishReason.LENGTH


def test_a_failed_step_of_several_ranks_is_the_end_and_its_cause_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    """The step that is waited for has the echo: a younger one has the error that explains it."""
    engine = MockEngine(depth=3)
    engine.core._has_peers = True
    echo = StepError("left alone", rank=0, step_id=1, is_echo=True)
    cause = StepError("step 2 failed\nTraceback", rank=1, step_id=2)
    fail_on(engine, 1, echo)
    asked: list[RankError] = []

    def root_cause(error: RankError) -> RankError:
        assert not engine.core._in_flight  # masks have been given up: the answer may have waited for them
        asked.append(error)
        return cause

    engine.executor.root_cause = root_cause
    engine.add("a", [1] * 5, 20)
    engine.step()
    with pytest.raises(StepError) as caught:
        engine.step()
    assert (caught.value, asked) == (cause, [echo])
    (record,) = caplog.records
    assert "step 2 failed\nTraceback\nThe plan was:\nstep 2: 1 requests" in record.getMessage()
    assert_dead(engine, "step 2 failed$")
    assert len(caplog.records) == 1


def test_a_failure_that_is_left_over_is_the_end_of_several_ranks_too() -> None:
    engine = MockEngine(depth=2)
    engine.core._has_peers = True
    engine.executor.root_cause = lambda error: error
    fail_on(engine, 1, StepError("bad luck", rank=0, step_id=1))
    engine.add("a", [1] * 5, 10, stop=frozenset(range(VOCAB_SIZE)))
    engine.step()
    with pytest.raises(StepError, match="bad luck"):
        engine.step()
    assert_dead(engine, "bad luck")


@pytest.mark.parametrize("kind", [StepTimeoutError, WorkerDiedError])
def test_a_rank_that_is_silent_or_gone_is_the_end(kind: type[RankError]) -> None:
    """Nobody knows what it is doing, or whether it does; and its old steps may hold what new ones need."""
    engine = MockEngine(depth=2)
    fail_on(engine, 1, kind("silence", rank=0, step_id=1))
    engine.add("a", [1] * 5, 20)
    engine.step()
    with pytest.raises(kind, match="silence"):
        engine.step()
    assert_dead(engine, "silence")


def test_one_rank_goes_on_only_if_it_can_still_compute(caplog: pytest.LogCaptureFixture) -> None:
    engine = MockEngine(depth=2)
    fail_on(engine, 1, StepError("bad luck", rank=0, step_id=1))
    checked: list[int] = []

    def check_health() -> None:
        checked.append(len(engine.executor.plans))
        raise StepError("no memory can be read", rank=0)

    engine.executor.check_health = check_health  # type: ignore[method-assign]
    engine.add("a", [1] * 5, 20)
    engine.step()
    with pytest.raises(StepError, match="bad luck"):
        engine.step()
    assert checked == [3]
    assert "the rank cannot run more steps: no memory can be read" in caplog.text
    assert_dead(engine, "bad luck")


def test_a_dead_rank_and_news_of_transfers_wake_the_engine() -> None:
    woken: list[int] = []

    class Listener(CoreListener):
        def wake(self) -> None:
            woken.append(len(woken))

    engine = MockEngine(transfer=KVTransferConfig(cpu_bytes=16), listener=Listener())
    assert engine.executor.on_death is not None
    engine.executor.on_death()
    assert isinstance(engine.scheduler.transfers, KVTransfers)
    engine.scheduler.transfers._on_news()
    assert woken == [0, 1]
