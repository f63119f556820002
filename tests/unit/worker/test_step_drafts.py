"""What a drafter learns of the times that are measured at the start."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from inflight.worker.step_drafts import StepDrafts
from tests.support.plans import ints


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
    found._max_num_seqs = fields.get("max_num_seqs", 4)
    found._costs = None
    found._started = None
    found._drawn_tokens = mock.MagicMock()
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
    (costs,) = drafter.set_costs.call_args.args
    assert costs.step([1, 2, 4]) == pytest.approx([1.0, 18 / 17, 20 / 17])
    assert costs.draft([1, 4]) == pytest.approx([0.2, 0.2])
    assert len(caplog.records) == 1
    assert "a step of 1 token takes 1000.0 ms" in caplog.text and "they pay if" in caplog.text


def test_drafts_that_never_pay_are_told(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    proposer = mock.Mock()
    with caplog.at_level("INFO", "inflight.worker.step_drafts"):
        drafts(None, proposer).time_steps(lambda n: clock.pass_by(9.0 + n), draws=True)
    assert proposer.choice.costs.step([1, 4, 16]) == pytest.approx([10.0, 13.0, 25.0])
    assert "they pay if 15% of them are right" in caplog.text
    drafter = mock.Mock()
    drafter.warm_up = lambda inputs: clock.pass_by(3.0)
    with caplog.at_level("INFO", "inflight.worker.step_drafts"):
        drafts(drafter).time_steps(lambda n: clock.pass_by(3.0 + n), draws=True)
    assert "so there are none" in caplog.text


def test_one_slow_run_changes_nothing(clock: Clock) -> None:
    proposer = mock.Mock()
    slow = iter([5.0, 0.0, 0.0, 0.0, 9.0, 0.0, 0.0, 0.0, 9.0])
    drafts(None, proposer).time_steps(lambda n: clock.pass_by((16.0 + n) / 17 + next(slow)), draws=True)
    assert proposer.choice.costs.step([1, 16]) == pytest.approx([1.0, 32 / 17])


def test_other_ranks_compute_the_same_steps_and_learn_nothing(clock: Clock) -> None:
    ran: list[int] = []
    proposer = mock.Mock()
    proposer.choice.costs = None
    drafts(None, proposer).time_steps(ran.append, draws=False)
    assert ran == [1, 1, 1, 5, 5, 5, 20, 20, 20]
    assert proposer.choice.costs is None
    drafts(None, proposer, is_timed=False).time_steps(ran.append, draws=True)
    assert len(ran) == 9


def test_more_sizes_are_measured_where_there_are_larger_steps() -> None:
    """Several requests with drafts are such a step."""
    for max_num_seqs, sizes in ((1, [1, 5]), (4, [1, 5, 20]), (8, [1, 5, 32]), (256, [1, 5, 32])):
        ran: list[int] = []
        drafts(None, mock.Mock(), max_num_seqs=max_num_seqs).time_steps(ran.append, draws=False)
        assert sorted(set(ran)) == sizes


@pytest.mark.parametrize("num_stages", [1, 2])
def test_real_steps_are_measured(clock: Clock, monkeypatch: pytest.MonkeyPatch, num_stages: int) -> None:
    """From the beginning of the forward to the draws; not if the step has prompts, or if it cannot have drafts."""
    monkeypatch.setattr("inflight.worker.step_drafts.resolve_drafts", lambda plan, inputs, *known: inputs)
    found = drafts(None, mock.Mock(), num_stages=num_stages)
    found._costs = mock.Mock()
    decoding = mock.Mock(input_ids=ints(1, 2, 3), draw_start_loc=ints(0, 2, 3))
    prompts = mock.Mock(input_ids=ints(1, 2, 3), draw_start_loc=ints(0, 2))
    for inputs in (decoding, prompts):
        found.resolve(mock.Mock(), inputs)
        clock.pass_by(0.5)
        found._observe(inputs)
    clock.pass_by(9.0)
    found._observe(decoding)  # a step whose inputs were known before
    assert found._costs.observe_step.call_args_list == [mock.call(3, 0.5 * num_stages)]
