"""The time of a step limits what it computes. The step times are known here, and nothing is learned."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import pytest

from inflight.interface.step import SchedulerOutput
from inflight.scheduler.scheduler import Scheduler
from inflight.scheduler.step_time.limits import VECTOR_SHARE, Prompt, StepBudget, StepLimits
from inflight.scheduler.step_time.load import StepLoad, load_of
from inflight.scheduler.step_time.model import StepTimeModel
from tests.support.mock_engine import MockEngine

FIXED, PER_TOKEN = 0.010, 0.001
STREAMS = ("s0", "s1")


def times() -> StepTimeModel:
    """A step costs 10 ms, and each token, of a prompt or not, 1 ms."""
    return StepTimeModel((FIXED, PER_TOKEN, PER_TOKEN, PER_TOKEN, 1e-12, 1e-12, 1e-12))


def seconds_of(plan: SchedulerOutput) -> float:
    return times().seconds(load_of(plan))


def limited(**limits: Any) -> MockEngine:
    """Blocks of 4 tokens; a prompt of more than 12 tokens is long."""
    sizes = {name: limits.pop(name) for name in list(limits) if name in MockEngine.__dataclass_fields__}
    engine = MockEngine(**{"max_num_batched_tokens": 60, "max_num_seqs": 8, "extra_blocks": 200, **sizes})
    engine.limit_times(times(), long_prefill_token_threshold=12, **{"max_step_seconds": 10.0, **limits})
    return engine


def decoding(engine: MockEngine, count: int = 2) -> None:
    """Streams that decode, and no prompt."""
    for i in range(count):
        engine.add(f"s{i}", [i], 40)
    engine.step()
    engine.step()


def rows(plan: SchedulerOutput) -> dict[str, int]:
    return dict(zip(plan.request_ids, plan.num_scheduled_tokens.tolist(), strict=True))


def plans_with(engine: MockEngine, request_id: str) -> list[SchedulerOutput]:
    return [plan for plan in engine.executor.plans if request_id in plan.request_ids]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("target", [0.020, 0.030])
def test_no_step_takes_longer_than_the_target_while_requests_decode(target: float, depth: int) -> None:
    engine = limited(target_seconds=target, depth=depth)
    decoding(engine)
    first = len(engine.executor.plans)
    engine.add("long", [7] * 50, 1)
    engine.run()
    plans = [plan for plan in engine.executor.plans[first:] if "long" in plan.request_ids]
    assert len(plans) >= 50 // (target / PER_TOKEN - 12)
    for plan in plans:
        assert seconds_of(plan) <= target * 1.001
        assert set(STREAMS) <= set(plan.request_ids)
    for plan in plans[:-1]:
        assert (
            int(plan.num_computed_tokens[-1] + plan.num_scheduled_tokens[-1]) % 4 == 0
        )  # chunks end with a full block


def test_auto_is_twice_what_the_decodes_need_but_at_least_100_ms() -> None:
    engine = limited(target_seconds=None, max_num_batched_tokens=400, max_num_seqs=4)
    decoding(engine)
    engine.add("long", [7] * 60, 1)
    engine.run()
    assert max(seconds_of(plan) for plan in plans_with(engine, "long")) > 0.050  # twice 12 ms would be 24 ms


def test_prompts_that_become_vectors_hardly_slow_the_decodes() -> None:
    """A step of two decodes takes 12 ms; with 2 tokens of such a prompt, 14 ms: at most 1.2 times as long. At least one token
    moves. A target of the user is for all prompts."""
    engine = limited(target_seconds=None)
    decoding(engine)
    engine.add("vector", [7] * 21, 0)
    engine.run()
    plans = plans_with(engine, "vector")
    assert [rows(plan)["vector"] for plan in plans if "s0" in plan.request_ids] == [2] * 10 + [1]
    assert max(seconds_of(plan) for plan in plans) <= VECTOR_SHARE * 0.012
    engine = limited(target_seconds=0.030)
    decoding(engine)
    engine.add("vector", [7] * 21, 0)
    engine.run()
    assert [rows(plan)["vector"] for plan in plans_with(engine, "vector")] == [16, 5]


def test_without_decodes_a_step_has_its_own_limit() -> None:
    engine = limited(target_seconds=0.015, max_step_seconds=0.0305)
    engine.add("long", [7] * 50, 1)
    engine.run()
    sizes = [rows(plan)["long"] for plan in plans_with(engine, "long")]
    assert sizes == [20, 20, 10]


def test_one_block_goes_into_every_step_and_a_target_that_cannot_be_met_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = limited(target_seconds=0.005)
    decoding(engine)
    with caplog.at_level(logging.WARNING):
        engine.add("long", [7] * 22, 1)
        engine.run()
    assert [rows(plan)["long"] for plan in plans_with(engine, "long")] == [4, 4, 4, 4, 4, 2]
    (record,) = [each for each in caplog.records if "target_inter_token_latency" in each.message]
    assert "is 5 ms" in record.message and "decodes 2 requests takes about 12.0 ms" in record.message


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    engine = limited(target_seconds=0.030)
    decoding(engine)
    engine.add("long", [7] * 60, 1)
    engine.step()
    engine.add("longer", [8] * 60, 1)
    engine.add("short", [9] * 6, 1)
    engine.step()
    engine.step()
    shorts = plans_with(engine, "short")
    assert [rows(plan)["short"] for plan in shorts] == [6]
    assert 8 <= rows(shorts[0])["long"] <= 12  # a long prompt always moves, by at least half of what there is
    engine.run()
    # the second long prompt has waited for the first one
    assert plans_with(engine, "longer")[0].step_id >= plans_with(engine, "long")[-1].step_id


def test_many_short_prompts_leave_a_long_one_half_of_each_step() -> None:
    engine = limited(target_seconds=0.034, max_num_seqs=16)
    decoding(engine)
    engine.add("long", [7] * 60, 1)
    engine.step()
    for i in range(8):
        engine.add(f"short{i}", [9, i] * 6, 1)
    engine.run()
    first, *others, _ = [rows(plan)["long"] for plan in plans_with(engine, "long")]
    assert first >= 20
    assert all(size >= 8 for size in others)
    assert plans_with(engine, "short0")[0].step_id < plans_with(engine, "long")[-1].step_id


def test_a_short_prompt_of_lower_priority_waits() -> None:
    engine = limited(target_seconds=0.030, policy="priority")
    decoding(engine)
    engine.add("long", [7] * 60, 1, priority=1)
    engine.step()
    engine.add("low", [9] * 6, 1, priority=2)
    engine.add("high", [5] * 6, 1, priority=0)
    engine.run()
    ends = {name: plans_with(engine, name)[-1].step_id for name in ("long", "low", "high")}
    assert ends["high"] < ends["long"] <= ends["low"]


@pytest.mark.parametrize("limits", [{}, {"max_num_partial_prefills": 1}])
def test_a_prompt_of_higher_priority_does_not_wait_for_a_running_one(limits: dict[str, Any]) -> None:
    engine = limited(target_seconds=0.030, policy="priority", **limits)
    decoding(engine)
    engine.add("low", [7] * 60, 1, priority=9)
    engine.step()
    engine.add("high", [8] * 40, 1, priority=0)
    engine.run()
    lows, highs = plans_with(engine, "low"), plans_with(engine, "high")
    assert highs[0].step_id <= lows[0].step_id + 2  # one step was in flight when it came
    assert rows(highs[0]).get("low", 0) <= 4  # one block
    assert highs[-1].step_id < lows[-1].step_id


def test_with_one_partial_prompt_at_a_time_nothing_overtakes_in_parts() -> None:
    engine = limited(target_seconds=0.030, max_num_partial_prefills=1)
    decoding(engine)
    engine.add("long", [7] * 60, 1)
    engine.step()
    engine.add("short", [9] * 6, 1)
    engine.run()
    assert plans_with(engine, "short")[0].step_id >= plans_with(engine, "long")[-1].step_id


def test_a_prompt_that_is_mostly_cached_is_short() -> None:
    engine = limited(target_seconds=0.030, caching=True)
    engine.add("first", [3] * 40, 2)
    engine.run()
    decoding(engine)
    engine.add("long", [7] * 60, 1)
    engine.step()
    engine.add("longer", [8] * 60, 1)
    engine.add("cached", [3] * 41, 1)
    engine.run()
    assert plans_with(engine, "cached")[0].step_id < plans_with(engine, "longer")[0].step_id


def test_drafts_are_cut_before_a_token_is_late() -> None:
    """Without a limit rows have 3 drafts; 14.5 ms are enough for 2 decodes and 2 drafts."""
    largest = []
    for target in (10.0, 0.0145):
        engine = limited(target_seconds=target, num_speculative_tokens=3)
        decoding(engine)
        engine.run()
        sizes = [plan.num_tokens for plan in engine.executor.plans[2:] if len(plan.request_ids) == 2]
        largest.append(max(sizes))
    assert largest[0] > 4 and largest[1] == 4


def test_with_a_stagger_the_steps_between_two_tokens_share_the_target() -> None:
    engine = limited(target_seconds=0.040, depth=3, stagger=2)
    decoding(engine, 4)
    engine.step()
    engine.add("long", [7] * 60, 1)
    engine.run()
    long_steps = plans_with(engine, "long")
    both = [seconds_of(a) + seconds_of(b) for a, b in itertools.pairwise(long_steps)]
    assert max(both[1:]) <= 0.040 * 1.001


def test_after_blocks_ran_out_a_prompt_is_still_limited() -> None:
    engine = limited(target_seconds=0.020, depth=3, windows=(8,), extra_blocks=0, caching=False)
    for i in range(3):
        engine.add(f"s{i}", [i] * 4, 20)
    engine.step()
    engine.step()
    engine.add("long", [7] * 30, 1)
    engine.run()
    with_decodes = [plan for plan in plans_with(engine, "long") if rows(plan).get("s0") == 1]
    assert len(with_decodes) >= 2
    assert max(seconds_of(plan) for plan in with_decodes) <= 0.020 * 1.001


def test_tokens_that_a_grammar_forces_are_limited_and_always_move() -> None:
    engine = limited(target_seconds=0.005, caching=False)
    for i in range(3):
        engine.add(f"forced{i}", [1], 40, grammar="726")  # it forces 10 tokens at once
    engine.scheduler.wait_for_grammars()
    engine.step()
    decoding(engine)
    engine.run()
    sizes = [rows(plan) for plan in engine.executor.plans if "s0" in plan.request_ids]
    forced = [[each[f"forced{i}"] for i in range(3)] for each in sizes if "forced0" in each]
    assert max(max(each) for each in forced) == 4  # one block
    assert all(len(set(each)) == 1 for each in forced)  # no stream waits for another one


@pytest.mark.parametrize("caching", [True, False])
def test_followers_that_lost_their_leader_are_long_prompts(caching: bool) -> None:
    engine = limited(target_seconds=0.030, caching=caching)
    decoding(engine)
    for child in range(4):
        engine.add(f"c{child}", [7] * 60, 1, leader="c0" if child else None)
    engine.step()
    engine.abort("c0")
    engine.add("short", [9] * 6, 1)
    engine.run()
    for plan in engine.executor.plans:
        ends = plan.num_computed_tokens + plan.num_scheduled_tokens
        partial = [
            name for name, end in zip(plan.request_ids, ends.tolist(), strict=True) if name[0] == "c" and end < 48
        ]
        assert len(partial) <= 1
    assert plans_with(engine, "short")[-1].step_id < plans_with(engine, "c3")[0].step_id


def test_a_long_prompt_leaves_the_whole_of_a_short_one_behind_it() -> None:
    """Also if another short prompt comes before both in queue order."""
    engine = limited()
    engine.limit_times(times(), target_seconds=0.0505, max_step_seconds=10.0, long_prefill_token_threshold=40)
    decoding(engine)
    engine.add("first", [6] * 40, 1)
    engine.step()
    engine.add("long", [7] * 60, 1)
    engine.add("short", [9] * 6, 1)
    engine.step()
    assert rows(engine.executor.plans[-1]) == {"s0": 1, "s1": 1, "first": 4, "long": 28, "short": 6}
    engine.run()


# -- general properties ----------------------------------------------------------------------------------------------


def token_gaps(engine: MockEngine, request_id: str, first_plan: int, seconds: StepTimeModel) -> list[float]:
    """The seconds between the ends of two steps that draw for a request, from `first_plan` until "long" is computed."""
    clock, ends = 0.0, []
    for plan in engine.executor.plans[first_plan : plans_with(engine, "long")[-1].step_id + 1]:
        clock += seconds.seconds(load_of(plan))
        if request_id in plan.request_ids and plan.samples[plan.request_ids.index(request_id)]:
            ends.append(clock)
    return [b - a for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("num_streams", [1, 3])
@pytest.mark.parametrize(("depth", "stagger"), [(1, 1), (3, 1), (3, 2), (4, 3)])
@pytest.mark.parametrize("target", [0.060, None])
def test_the_time_between_two_tokens_is_the_target_and_prompts_use_it(
    target: float | None, depth: int, stagger: int, num_streams: int
) -> None:
    """With the target `auto` all times are tenfold, so that twice the time between two tokens is more than 100 ms."""
    slow = 10 if target is None else 1
    fixed, token = slow * FIXED, slow * PER_TOKEN
    model = StepTimeModel((fixed, token, token, token, 1e-12, 1e-12, 1e-12))
    engine = MockEngine(
        max_num_batched_tokens=400, max_num_seqs=8, extra_blocks=200, caching=False, depth=depth, stagger=stagger
    )
    engine.limit_times(
        model, long_prefill_token_threshold=12, max_step_seconds=10.0, target_seconds=target, stagger=stagger
    )
    decoding(engine, num_streams)
    first = len(engine.executor.plans)
    for name in ("before", "long"):
        engine.add(name, [7] * 60, 1)
    engine.run()
    most = target or 2 * stagger * (fixed + token * num_streams)
    gaps = [gap for i in range(num_streams) for gap in token_gaps(engine, f"s{i}", first, model)]
    # a block of a long prompt is computed in each step, also if a short prompt has already filled the step
    assert max(gaps, default=0.0) <= most * 1.001 + 4 * token
    prompt_steps = [plan for plan in engine.executor.plans[first:] if {"before", "long"} & set(plan.request_ids)]
    # The last chunk may be small. Chunks end with a block, so a step may leave 3 tokens unused.
    used = [model.seconds(load_of(plan)) for plan in prompt_steps[stagger:-1]]
    assert sum(used) >= len(used) * (most / stagger - token * (4 + 2 * num_streams))


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_load_that_a_budget_adds_up_is_the_load_of_the_plan(
    num_drafts: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the step takes longer or shorter than its budget says. Prompts, decodes, drafts that are cut, and tokens that a
    grammar forces are in the same steps."""
    budgets: list[StepBudget] = []
    make_budget, record_planned, checked = Scheduler._budget, StepLimits.planned, []

    def budget(scheduler: Scheduler) -> StepBudget:
        budgets.append(make_budget(scheduler))
        return budgets[-1]

    def planned(limits: StepLimits, plan: SchedulerOutput, encoder_seconds: float) -> float:
        if budgets[-1].times is not None:
            assert budgets[-1].load == load_of(plan)
            checked.append(plan)
        return record_planned(limits, plan, encoder_seconds)

    monkeypatch.setattr(Scheduler, "_budget", budget)
    monkeypatch.setattr(StepLimits, "planned", planned)
    engine = limited(target_seconds=0.0215, num_speculative_tokens=num_drafts, depth=depth, caching=False)
    decoding(engine)
    engine.add("forced", [1], 20, grammar="726")
    engine.add("long", [7] * 50, 3)
    engine.scheduler.wait_for_grammars()
    engine.run()
    assert len(checked) > 9


def one_row_plan(num_tokens: int) -> SchedulerOutput:
    engine = MockEngine(caching=False)
    engine.add("a", [1] * num_tokens, 1)
    engine.run()
    return engine.executor.plans[0]


def test_a_measured_time_is_compared_with_the_prediction_for_its_own_step() -> None:
    """Steps are committed in the order in which they were planned. Steps that are void are never committed."""
    limits = limited().scheduler.limits
    void, first, second = one_row_plan(30), one_row_plan(10), one_row_plan(20)
    limits.planned(void)
    limits.void()
    clock = limits.planned(void) - limits.predicted_seconds
    limits.void()
    assert clock == pytest.approx(0.040)  # the clock never goes back
    ends = [limits.planned(plan) for plan in (first, second)]
    assert limits.predicted_seconds == pytest.approx(0.030)
    assert ends == pytest.approx([0.080 + 0.020, 0.080 + 0.020 + 0.030])
    limits.committed(0.0)
    assert limits.last_step is None  # its time is not known, and nothing is learned from it
    assert limits.times is not None and limits.times.slowdown == 1.0
    limits.committed(0.045)
    assert limits.last_step == pytest.approx((0.030, 0.045))
    assert limits.times.slowdown > 1.0
    limits.planned(first)
    limits.committed(0.0)
    assert limits.last_step is None  # the times of the step before are not told again


def test_a_prompt_that_yielded_to_another_one_is_still_limited_in_the_next_step() -> None:
    """The short prompt of the higher priority is computed in the step in which it arrives. After that nothing waits."""
    engine = limited(target_seconds=0.030, policy="priority")
    decoding(engine)
    engine.add("low", [7] * 60, 1, priority=9)
    engine.step()
    engine.add("high", [5] * 6, 1, priority=0)
    engine.run()
    assert len(plans_with(engine, "high")) == 1
    for plan in plans_with(engine, "low"):
        assert seconds_of(plan) <= 0.030 * 1.001


@pytest.mark.parametrize("most", [1, 2])
def test_so_many_prompts_may_be_computed_in_part(most: int) -> None:
    """The long prompt leaves the short one 8 tokens of a step, but the short one has 12."""
    engine = limited(target_seconds=0.030, max_num_partial_prefills=most)
    decoding(engine)
    engine.add("long", [7] * 60, 1)
    engine.step()
    engine.add("short", [9] * 12, 1)
    engine.run()
    shorts, last_long = plans_with(engine, "short"), plans_with(engine, "long")[-1]
    assert (shorts[0].step_id < last_long.step_id) == (most == 2)


def test_a_short_prompt_that_is_left_in_part_lets_a_long_one_start() -> None:
    """Only long prompts count as long ones of which at most so many are computed in part."""
    budget = StepBudget(100, 4, None, math.inf, StepLoad(), 0)
    budget.add_prompt(Prompt(context=0, wanted=10, is_long=False, priority=0), 4)
    assert (budget.num_partial, budget.num_long_partial, budget.num_tokens) == (1, 0, 96)
    budget.add_prompt(Prompt(context=0, wanted=50, is_long=True, priority=0), 0)  # skipped, but not complete
    assert (budget.num_partial, budget.num_long_partial, budget.num_tokens) == (2, 1, 96)
    assert budget.leaves_prompts
    budget.waiting_priority = 1
    budget.add_prompt(Prompt(context=0, wanted=50, is_long=True, priority=3), 4)
    budget.add_prompt(Prompt(context=0, wanted=50, is_long=True, priority=2), 4)
    assert (budget.num_partial, budget.yielding_priority) == (2, 2)
