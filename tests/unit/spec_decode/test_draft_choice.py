"""How many drafts pay, on simulated machines: real times are given by a formula, and the choice learns them from its steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.spec_decode import model_drafter
from inflight.spec_decode.draft_choice import (
    DraftChoice,
    best_num_drafts,
    best_within,
    expected,
    expected_right,
    fewest_right,
)
from inflight.spec_decode.draft_costs import DraftCosts, MeasuredCosts

K = 4


class Machine(NamedTuple):
    """Seconds of a step of n tokens, and of a pass of the drafter for n requests."""

    step: Callable[[float], float]
    draft: Callable[[float], float]

    def measured(self, sizes: tuple[int, ...] = (1, 1 + K, 32)) -> MeasuredCosts:
        """What is known at the start."""
        drafts = {size: self.draft(size) for size in sizes} if self.draft(1) else {}
        return MeasuredCosts({size: self.step(size) for size in sizes}, drafts)


CPU = Machine(lambda n: max(40.0, 6.5 * n), lambda n: max(7.0, 2.4 * n))  # a model of 0.6 billion parameters, two cores
PARALLEL = Machine(lambda n: max(40.0, 0.16 * n), lambda n: max(2.0, 0.02 * n))
NGRAMS = Machine(lambda n: max(40.0, 6.5 * n), lambda n: 0.0)


class Run:
    """A batch whose drafts are right with the probability `right`."""

    def __init__(self, machine: Machine, costs: DraftCosts, num_requests: int, right: float, seed: int = 0) -> None:
        self.machine, self.num_requests, self.right = machine, num_requests, right
        self.choice = DraftChoice(costs, K)
        self.random = Random(seed)
        self.noise = Random(seed)
        self.counts = [0] * num_requests  # of the next step

    def steps(self, number: int) -> float:
        """Returns the tokens per second / those of steps without drafts."""
        n, tokens, seconds = self.num_requests, 0, 0.0
        for _ in range(number):
            emitted = sum(1 + self._num_right(count) for count in self.counts)
            took = self.machine.step(n + sum(self.counts)) * self.noise.uniform(0.95, 1.05)
            self.choice.costs.observe_step(n + sum(self.counts), took)
            self.counts = self.choice.counts([self.right] * n, [K] * n)
            passes = max(self.counts)
            if passes and self.choice.costs.has_passes:
                one = self.machine.draft(sum(self.counts) / passes) * self.noise.uniform(0.95, 1.05)
                self.choice.costs.observe_draft(sum(self.counts) / passes, one)
                took += passes * one
            tokens, seconds = tokens + emitted, seconds + took
        return tokens / seconds / (n / self.machine.step(n))

    def _num_right(self, count: int) -> int:
        return next((each for each in range(count) if self.random.random() >= self.right), count)

    def best_ratio(self) -> float:
        """The same as what `steps` returns, of the best number of drafts that is the same for all."""
        n = self.num_requests
        alone = n / self.machine.step(n)
        rates = [
            n * sum(self.right**i for i in range(count + 1))
            / (self.machine.step(n * (1 + count)) + count * self.machine.draft(n))
            for count in range(K + 1)
        ]  # fmt: skip
        return max(rates) / alone


@pytest.mark.parametrize("right", [0.0, 0.3, 0.6, 0.8])
@pytest.mark.parametrize("num_requests", [1, 8, 32])
@pytest.mark.parametrize("machine", [CPU, PARALLEL, NGRAMS], ids=["cpu", "parallel", "ngrams"])
def test_drafts_cost_nothing_where_they_do_not_pay_and_help_where_they_do(
    machine: Machine, num_requests: int, right: float
) -> None:
    run = Run(machine, machine.measured(), num_requests, right)
    run.steps(20)  # what was measured at the start is corrected
    ratio = run.steps(200)
    assert ratio >= 0.98
    assert ratio >= 0.9 * run.best_ratio()


@pytest.mark.parametrize("right", [0.0, 0.6, 0.8])
@pytest.mark.parametrize("machine", [CPU, NGRAMS], ids=["cpu", "ngrams"])
def test_a_new_engine_does_not_begin_a_full_batch_with_drafts(machine: Machine, right: float) -> None:
    """How often drafts are right is not known yet. The times of small steps are."""
    run = Run(machine, machine.measured(), 32, right)
    at_start = model_drafter.RIGHT_AT_START / model_drafter.DRAFTS_AT_START
    for _ in range(10):
        assert run.choice.counts([at_start] * 32, [K] * 32) == [0] * 32
    assert run.steps(96) >= 0.98


@pytest.mark.parametrize("sizes", [(1, 5), (1, 5, 32)], ids=["small steps only", "also a large one"])
@pytest.mark.parametrize("num_requests", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_the_choice_is_that_of_the_true_costs(num_requests: int, sizes: tuple[int, ...]) -> None:
    """What was measured at the start was too good for large batches."""
    run = Run(CPU, CPU.measured(sizes), num_requests, 0.8)
    run.steps(60)
    found = [run.steps(1) and sum(run.counts) for _ in range(20)]
    assert (np.median(found) > 0) == (run.best_ratio() > 1.05)


def test_the_choice_follows_costs_that_change() -> None:
    run = Run(PARALLEL, PARALLEL.measured(), 32, 0.8)
    assert run.steps(50) > 1.5
    run.machine = CPU
    run.steps(50)
    assert run.steps(200) >= 0.98
    run.machine = PARALLEL
    run.num_requests, run.counts = 2, [0] * 2
    run.steps(100)
    assert run.steps(100) > 1.5


def test_costs_that_were_a_little_too_high_are_found_out_by_trials() -> None:
    machine = Machine(lambda n: 40.0 + 0.5 * n, lambda n: 2.0)
    believed = Machine(lambda n: 40.0 + 2.0 * n, lambda n: 14.0)
    assert not any(best_num_drafts([0.5] * 8, [K] * 8, believed.measured()))
    run = Run(machine, believed.measured(), 8, 0.5)
    run.steps(400)
    found = [run.steps(1) and sum(run.counts) for _ in range(20)]
    assert np.median(found) > 0


@pytest.mark.parametrize("seconds", [50.0, 1000.0])
def test_one_pass_that_took_long_does_not_turn_drafts_off(seconds: float) -> None:
    """Another program had the processor. A pass takes 7."""
    run = Run(CPU, CPU.measured(), 1, 0.6)
    run.choice.costs.observe_draft(1, seconds)
    run.steps(100)
    assert run.steps(100) > 1.35


def test_an_estimate_makes_no_trials() -> None:
    choice = DraftChoice(DraftCosts(16.0, 0.3), K)
    found = {tuple(choice.counts([0.2], [K])) for _ in range(1000)}
    assert found == {(0,)}


def test_time_for_trials_is_saved_up_and_spent() -> None:
    choice = DraftChoice(MeasuredCosts({1: 100.0, 32: 100.0}, {1: 9.99, 32: 9.99}), K)
    assert not choice.spend_on(1)
    for _ in range(100):
        choice.counts([0.0], [K])
    assert [choice.spend_on(1) for _ in range(11)] == [True] * 10 + [False]  # a step's time, 100 seconds
    for _ in range(11):
        choice.counts([0.0], [K])
    assert choice.spend_on(1) and not choice.spend_on(1)
    for _ in range(1000):
        choice.counts([0.0], [K])
    assert [choice.spend_on(1) for _ in range(11)] == [True] * 10 + [False]  # no more is saved


def test_how_many_tokens_a_drafter_may_catch_up_with() -> None:
    assert DraftChoice(MeasuredCosts({1: 100.0, 32: 100.0}, {1: 1.0, 32: 32.0}), K).num_tokens_behind(1) == 32
    assert DraftChoice(MeasuredCosts({1: 1.0, 32: 1.0}, {1: 1.0, 32: 32.0}), K).num_tokens_behind(1) == 16


def test_drafts_may_pay_in_small_batches_only() -> None:
    choice = DraftChoice(CPU.measured(), K)
    assert choice.may_pay(1) and not choice.may_pay(64)
    choice.costs = PARALLEL.measured()
    for _ in range(32):  # it is found out again
        choice.counts([0.0], [0])
    assert choice.may_pay(64)


@given(
    rows=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), min_size=1, max_size=4),
    free_tokens=st.sampled_from([2.0, 16.0, 256.0]),
)
def test_the_numbers_are_the_best_of_all(rows: list[tuple[float, int]], free_tokens: float) -> None:
    def speed(counts: tuple[int, ...]) -> float:
        tokens = sum(sum(p**i for i in range(count + 1)) for (p, _), count in zip(rows, counts, strict=True))
        return tokens / (free_tokens + len(rows) + sum(counts))

    best = max(speed(counts) for counts in itertools.product(*(range(most + 1) for _, most in rows)))
    chosen = best_within(math.inf, [p for p, _ in rows], [most for _, most in rows], DraftCosts(free_tokens), 1.0)
    assert all(0 <= count <= most for count, (_, most) in zip(chosen, rows, strict=True))
    assert speed(tuple(chosen)) == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("probabilities", [[0.9], [0.2], [0.9, 0.9, 0.1], [0.7] * 32])
def test_the_best_numbers_of_passes(probabilities: list[float], share: float) -> None:
    """No other number of drafts that is the same for all requests gives more tokens per time."""
    n, costs = len(probabilities), DraftCosts(16.0, share)

    def rate(counts: list[int]) -> float:
        tokens, seconds = expected(probabilities, counts, costs)
        return tokens / seconds

    chosen = best_within(math.inf, probabilities, [6] * n, costs, 1.0)
    assert rate(chosen) >= max(rate([count] * n) for count in range(7)) - 1e-9
    assert max(best_num_drafts(probabilities, [2] * n, costs)) <= 2
    if share == 1.0:
        assert not any(chosen)


@given(
    probabilities=st.lists(st.floats(0, 1), min_size=2, max_size=6),
    share=st.sampled_from([0.0, 0.1]),
    discount=st.sampled_from([0.5, 1.0]),
)
def test_no_request_waits_long_for_the_drafts_of_others(
    probabilities: list[float], share: float, discount: float
) -> None:
    n, costs = len(probabilities), DraftCosts(4.0, share)
    chosen = best_num_drafts(probabilities, [K] * n, costs, discount)
    _, seconds = expected(probabilities, chosen, costs)
    alone = float(costs.step([n])[0])
    assert seconds <= 2 * alone
    slowest = (seconds / (1 + expected_right(probabilities, chosen))).max()
    assert slowest <= 1.2 * alone + 1e-9


def test_a_request_alone_may_have_long_steps() -> None:
    (count,) = best_num_drafts([0.99], [64], DraftCosts(4.0))
    assert 4.0 + 1 + count > 3 * (4.0 + 1)


def test_no_requests_and_no_drafts() -> None:
    costs = DraftCosts(16.0)
    assert best_num_drafts([], [], costs) == []
    assert best_num_drafts([1.0, 1.0], [0, 0], costs) == [0, 0]


def test_dearer_drafts_must_be_right_more_often() -> None:
    found = [fewest_right(4, DraftCosts(16.0, share)) for share in (0.0, 0.2, 0.5)]
    assert all(share is not None for share in found)
    assert found == sorted(found, key=lambda share: share or 1.0) and found[0] != found[-1]
    assert fewest_right(4, DraftCosts(16.0, 1.0)) is None
    assert fewest_right(4, DraftCosts(1.0, 0.5)) is None


def test_expected_tokens_and_seconds() -> None:
    tokens, seconds = expected([0.5, 0.5], [2, 0], DraftCosts(16.0, 0.5))
    assert tokens == pytest.approx(2 + 0.5 + 0.25)
    assert seconds == pytest.approx(16 + 4 + 2 * 0.5 * 17)
    assert np.isclose(expected([0.5], [0], DraftCosts(16.0, 0.5))[1], 17)
