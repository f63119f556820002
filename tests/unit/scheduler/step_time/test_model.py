"""`StepTimeModel` against step times that are known: it finds them, follows the machine, and keeps what it does not see."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable

import pytest

from inflight.scheduler.step_time.load import TOKEN_LIMITS, StepLoad, load_of
from inflight.scheduler.step_time.model import StepTimeModel
from tests.support.plans import ints, step_plan

Truth = Callable[[StepLoad], float]


def true_seconds(load: StepLoad) -> float:
    """As a memory-bound device: the weights are read at least once; then tokens cost."""
    weights = max(0.030, 0.002 * load.num_tokens)
    return weights + 2e-7 * load.num_pairs + 4e-6 * load.context + 3e-4 * load.num_draws


def started(truth: Truth = true_seconds) -> StepTimeModel:
    return StepTimeModel.from_times([truth(prompt(count)) for count in (1, *TOKEN_LIMITS)])


def prompt(num_tokens: int, context: int = 0) -> StepLoad:
    load = StepLoad()
    load.add_prompt(context, num_tokens, draws=True)
    return load


def decodes(count: int, context: int) -> StepLoad:
    load = StepLoad()
    for _ in range(count):
        load.add_decode(context)
    return load


def some_load(rng: random.Random) -> StepLoad:
    load = decodes(rng.randrange(1, 12), rng.randrange(3000))
    if rng.random() < 0.5:
        load.add_prompt(rng.randrange(8000), rng.randrange(1, 400), draws=False)
    return load


def errors(model: StepTimeModel, truth: Truth, rng: random.Random, count: int) -> list[float]:
    """|measured / predicted - 1| of `count` steps, which the model learns from; sorted."""
    found = []
    for _ in range(count):
        load = some_load(rng)
        seconds = truth(load) * rng.lognormvariate(0, 0.05)
        found.append(abs(seconds / model.seconds(load) - 1))
        model.observe(load, seconds)
    return sorted(found)


def test_it_learns_what_steps_cost() -> None:
    rng, model = random.Random(0), started()
    errors(model, true_seconds, rng, 200)
    found = errors(model, true_seconds, rng, 500)
    assert found[250] < 0.08 and found[490] < 0.25


def share_read(num_tokens: int) -> float:
    """Of a mixture whose experts are nine tenths of its weights, and of whose 64 experts a token chooses 8."""
    return 0.1 + 0.9 * (1 - (1 - 8 / 64) ** num_tokens)


def seconds_of_experts(load: StepLoad) -> float:
    return (
        0.001
        + 0.080 * share_read(load.num_tokens)
        + 3e-4 * load.num_tokens
        + 2e-7 * load.num_pairs
        + 4e-6 * load.context
    )


def test_the_reading_of_experts_is_known_from_the_start() -> None:
    """A decode of 4 rows reads 0.41 of the experts, and one of 16 rows 0.88: the three costs of tokens alone would take a token
    of each to cost the same, as the second assertion shows."""

    def worst(model: StepTimeModel) -> float:
        loads = [decodes(count, 100) for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)]
        return max(abs(seconds_of_experts(load) / model.seconds(load) - 1) for load in loads)

    times = [seconds_of_experts(prompt(count)) for count in (1, *TOKEN_LIMITS)]
    good, bad = (worst(StepTimeModel.from_times(times, share)) for share in (share_read, None))
    assert good < 0.15 and bad > 0.2
    model, rng = StepTimeModel.from_times((1.0, 1.0, 1.0), share_read), random.Random(0)
    errors(model, seconds_of_experts, rng, 300)
    assert errors(model, seconds_of_experts, rng, 300)[285] < 0.25


@pytest.mark.parametrize("seconds", [0.02, 0.05, 0.08, 0.1, 0.3])
def test_as_many_prompt_tokens_as_fit_beside_experts(seconds: float) -> None:
    times = [seconds_of_experts(prompt(count)) for count in (1, *TOKEN_LIMITS)]
    model = StepTimeModel.from_times(times, share_read)
    count = model.num_prompt_tokens_within(seconds, decodes(4, 100), 0, 2048)

    def with_prompt(num_tokens: int) -> float:
        larger = decodes(4, 100)
        larger.add_prompt(0, num_tokens, draws=False)
        return model.seconds(larger)

    assert count == 0 or with_prompt(count) <= seconds * 1.001
    assert count == 2048 or with_prompt(count + 1) > seconds * 0.999


def test_a_wrong_start_is_forgotten() -> None:
    rng, model = random.Random(0), StepTimeModel.from_times((1.0, 1.0, 1.0))
    errors(model, true_seconds, rng, 300)
    assert errors(model, true_seconds, rng, 300)[285] < 0.25


def test_it_follows_a_slower_machine_within_a_few_steps() -> None:
    rng, model = random.Random(0), started()
    errors(model, true_seconds, rng, 300)
    slow = lambda load: 3 * true_seconds(load)  # noqa: E731
    errors(model, slow, rng, 6)
    assert errors(model, slow, rng, 50)[45] < 0.3
    errors(model, true_seconds, rng, 30)
    assert errors(model, true_seconds, rng, 50)[45] < 0.3


def test_what_no_step_shows_is_kept() -> None:
    """After an hour of decodes a prompt costs what it did."""
    rng, model = random.Random(0), started()
    errors(model, true_seconds, rng, 300)
    before = model.seconds(prompt(256, 1000))
    for _ in range(5000):
        load = decodes(8, rng.randrange(3000))
        model.observe(load, true_seconds(load) * rng.lognormvariate(0, 0.05))
    assert model.seconds(prompt(256, 1000)) == pytest.approx(before, rel=0.3)


def test_costs_stay_positive_and_finite() -> None:
    rng, model = random.Random(0), started()
    for _ in range(2000):
        model.observe(some_load(rng), rng.choice([1e-6, 1e-3, 1.0, 100.0]))
        assert 0 < model.seconds(prompt(64)) < 1e9


@pytest.mark.parametrize("context", [0, 5000])
@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.1, 0.3, 2.0, 100.0])
def test_as_many_prompt_tokens_as_fit(seconds: float, context: int) -> None:
    model, load = started(), decodes(4, 100)
    count = model.num_prompt_tokens_within(seconds, load, context, 2048)

    def with_prompt(num_tokens: int) -> float:
        larger = decodes(4, 100)
        larger.add_prompt(context, num_tokens, draws=False)
        return model.seconds(larger)

    assert count == 0 or with_prompt(count) <= seconds * 1.001
    assert count == 2048 or with_prompt(count + 1) > seconds * 0.999


def test_the_load_of_a_plan() -> None:
    # a prompt, a decode, and one with drafts
    plan = step_plan([0, 1, 2], [100, 50, 70], [20, 1, 4], [False, True, True], max_draft_tokens=ints(-1, -1, 3))
    expected = StepLoad()
    expected.add_prompt(100, 20, draws=False)
    expected.add_decode(50)
    expected.add_decode(70, num_drafts=3)
    assert load_of(plan) == expected


def test_a_process_that_was_stopped_for_a_minute_is_forgotten_within_a_few_steps() -> None:
    rng, model = random.Random(0), started()
    errors(model, true_seconds, rng, 300)
    for _ in range(2):  # steps in flight
        model.observe(some_load(rng), 60.0)
    errors(model, true_seconds, rng, 30)
    assert errors(model, true_seconds, rng, 100)[90] < 0.3


@pytest.mark.parametrize("noise", [lambda rng: rng.lognormvariate(0, 0.5), lambda rng: rng.choice([1, 1, 6])])
def test_after_noisy_times_it_still_follows_a_slower_machine(noise: Callable[[random.Random], float]) -> None:
    """Noise must not move costs and slowdown apart until both are at their bounds: then neither could follow."""
    rng, model = random.Random(1), started()
    for _ in range(4000):
        load = some_load(rng)
        model.observe(load, true_seconds(load) * noise(rng))
    assert 0.2 < model.slowdown < 5
    slow = lambda load: 4 * true_seconds(load)  # noqa: E731
    errors(model, slow, rng, 20)
    assert errors(model, slow, rng, 100)[90] < 0.3


@pytest.mark.parametrize("slowdown", [2.0, 0.5])
def test_each_step_moves_the_slowdown_a_little_toward_1(slowdown: float) -> None:
    """So if the machine stays slow, in the end the costs say so. Without this, noise would move the costs up and the slowdown
    down, or the other way, without end."""
    model, load = started(), decodes(4, 1000)
    model.slowdown, before = slowdown, started().seconds(load)
    distances = []
    for _ in range(100):
        model.observe(load, model.seconds(load))  # the prediction was right
        distances.append(abs(math.log(model.slowdown)))
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 0.95 * math.log(2) and distances[-1] < 0.5 * math.log(2)
    assert model.seconds(load) == pytest.approx(before * model.slowdown)


def test_prompts_leave_the_room_that_the_predictions_are_wrong_by() -> None:
    """So most steps keep the limit, although times are noisy. Without the room half of them would take longer."""
    rng, model, limit = random.Random(0), started(), 0.5
    num_late = 0
    for number in range(600):
        load = decodes(4, 1000)
        load.add_prompt(0, model.num_prompt_tokens_within(limit, load, 0, 4096), draws=False)
        seconds = true_seconds(load) * rng.lognormvariate(0, 0.2)
        num_late += number >= 100 and seconds > limit
        model.observe(load, seconds)
    assert 0.1 < num_late / 500 < 0.35


def test_the_room_for_prompts_shrinks_at_once_and_grows_slowly() -> None:
    """Beside a program that computes, pauses and goes on, and so makes steps longer."""
    model, load = started(), decodes(4, 1000)

    def rooms(count: int, factor: float) -> list[int]:
        found = []
        for _ in range(count):
            model.observe(load, factor * true_seconds(load))
            found.append(model.num_prompt_tokens_within(0.5, load, 0, 4096))
        return found

    quiet = rooms(50, 1.0)[-1]
    beside = rooms(3, 2.0)[-1]
    assert beside < 0.6 * quiet
    pause = rooms(60, 1.0)
    assert pause[2] < 0.75 * quiet, "the predictions are right again, but the program may go on"
    assert pause == sorted(pause) and pause[-1] > 0.9 * quiet


def test_most_gaps_keep_the_target_beside_a_program_that_comes_and_goes() -> None:
    """Steps of 8 decodes and a long prompt, planned one ahead. Every few seconds, steps become 1.8 times as long or short."""
    rng, model, target = random.Random(0), started(), 0.25
    now, turns_at, slow, planned, gaps = 0.0, 3.0, 1.0, deque[StepLoad](), []
    while now < 400:
        while len(planned) < 2:
            load = decodes(8, 150)
            load.add_prompt(1000, max(16, model.num_prompt_tokens_within(target, load, 1000, 2048)), draws=False)
            planned.append(load)
        if now > turns_at:
            turns_at, slow = now + rng.uniform(1, 4), 2.8 - slow
        load = planned.popleft()
        gaps.append(slow * true_seconds(load) * rng.lognormvariate(0, 0.06))
        model.observe(load, gaps[-1])
        now += gaps[-1]
    gaps = sorted(gaps[50:])
    assert gaps[int(0.99 * len(gaps))] < 1.5 * target
    assert gaps[len(gaps) // 2] > 0.6 * target, "steps are not shorter than they must be"


def test_one_strange_step_changes_little() -> None:
    model, load = started(), decodes(4, 1000)
    for _ in range(50):
        model.observe(load, model.seconds(load))
    before, spread = model.num_prompt_tokens_within(0.5, load, 0, 4096), model._spread
    model.observe(load, 1.1 * model.seconds(load))
    assert spread < model._spread < 0.01  # the mean error of many steps, not that of the last one
    assert 0.9 * before < model.num_prompt_tokens_within(0.5, load, 0, 4096) < before
