"""What a drafter learns of the times that are measured at the start."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from inflight.spec_decode.draft_costs import DraftCosts
from inflight.worker.step_drafts import StepDrafts


class Clock:
    """`perf_counter`, which only `pass_by` moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("inflight.worker.step_drafts.time.perf_counter", found)
    return found


def drafts(drafter: Any, proposer: Any = None, **fields: Any) -> StepDrafts:  # Any: stand-ins
    found = StepDrafts.__new__(StepDrafts)
    found._draft_model, found._proposer = drafter, proposer
    found._num_speculative_tokens = 4
    found._num_stages = fields.get("num_stages", 1)
    found._is_timed = fields.get("is_timed", True)
    return found


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_pass_of_the_drafter_is_no_part_of_a_step(
    clock: Clock, num_stages: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A dummy run has one. A stage takes a part of a step's time."""
    drafter = mock.Mock()
    drafter.warm_up = lambda inputs: clock.pass_by(0.2)
    with caplog.at_level("INFO", "inflight.worker.step_drafts"):
        drafts(drafter, num_stages=num_stages).time_steps(
            lambda n: clock.pass_by(0.2 + (16.0 + n) / 17 / num_stages), draws=True
        )
    assert drafter.costs.free_tokens == pytest.approx(16.0)
    assert drafter.costs.share_of_step == pytest.approx(0.2)
    assert len(caplog.records) == 1
    assert "a step of 1 token takes 1000.0 ms" in caplog.text and "they pay if" in caplog.text


def test_drafts_that_never_pay_are_told(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    proposer = mock.Mock()
    with caplog.at_level("INFO", "inflight.worker.step_drafts"):
        drafts(None, proposer).time_steps(lambda n: clock.pass_by(float(n)), draws=True)
    assert proposer.costs == DraftCosts(1.0)
    assert "pay if" in caplog.text
    drafter = mock.Mock()
    drafter.warm_up = lambda inputs: clock.pass_by(3.0)
    with caplog.at_level("INFO", "inflight.worker.step_drafts"):
        drafts(drafter).time_steps(lambda n: clock.pass_by(3.0 + n), draws=True)
    assert "so there are none" in caplog.text


def test_one_slow_run_changes_nothing(clock: Clock) -> None:
    proposer = mock.Mock()
    slow = iter([5.0, 0.0, 0.0, 0.0, 9.0, 0.0])
    drafts(None, proposer).time_steps(lambda n: clock.pass_by((16.0 + n) / 17 + next(slow)), draws=True)
    assert proposer.costs.free_tokens == pytest.approx(16.0)


def test_other_ranks_compute_the_same_steps_and_learn_nothing(clock: Clock) -> None:
    ran: list[int] = []
    proposer = mock.Mock(costs=None)
    drafts(None, proposer).time_steps(ran.append, draws=False)
    assert ran == [1, 1, 1, 5, 5, 5]
    assert proposer.costs is None
    drafts(None, proposer, is_timed=False).time_steps(ran.append, draws=True)
    assert len(ran) == 6
