"""Cores that keep step: no replica waits for ever, and all requests get their tokens, whatever idles, ends or fails."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from inflight.engine.lockstep.core import LockstepCore
from inflight.engine.lockstep.group import Phase
from inflight.errors import WorkerDiedError
from inflight.interface.expert_counts import ExpertCounts
from inflight.interface.request import FinishReason
from tests.conftest import FULL
from tests.support.lockstep_world import World
from tests.support.mock_engine import VOCAB_SIZE

NUM_STEPS = 1_000_000 if FULL else 10_000  # of all worlds of the fuzz together
STEPS_OF_A_WORLD = 500


def core_of(world: World, index: int) -> LockstepCore:
    core = world.engines[index].core
    assert isinstance(core, LockstepCore)
    return core


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    found = World(2, Random(0), monkeypatch, depth=2)
    found.settle()
    assert [core_of(found, index)._group.phase for index in range(2)] == [Phase.RUNNING] * 2
    yield found
    found.close()


def test_a_replica_without_requests_takes_part_in_the_steps_of_the_other(world: World) -> None:
    first, second = world.engines
    first.add("a", [1, 2, 3], max_tokens=8)
    world.settle()
    assert first.finished == {"a": FinishReason.LENGTH} and len(first.outputs["a"]) == 8
    one, other = world.executor(0), world.executor(1)
    assert one.num_idle == 0 and other.num_idle == other.num_submitted == one.num_submitted == 8
    assert second.core.take_stats().step_id == -1, "it has committed no step of its own"


def test_a_rank_is_asked_about_its_experts_from_time_to_time(world: World) -> None:
    core = core_of(world, 0)
    assert core.take_stats().experts is None, "the rank is asked for the first time"
    counts = core.take_stats().experts
    assert counts == ExpertCounts(2, 60, 40, 1, 2, 0) and counts.balance == 0.75
    assert core.take_stats().experts is None, "it is not asked in each report"


def test_all_idle_nobody_runs_and_one_frame_wakes_all(world: World) -> None:
    assert world.num_steps == 0 and not world.turn()
    world.engines[1].add("b", [4], max_tokens=2)
    world.settle()
    assert world.executor(0).num_idle == 2 and not world.turn()


def test_requests_of_both_replicas_share_steps(world: World) -> None:
    for index, engine in enumerate(world.engines):
        engine.add("a", [index + 1, 2, 3], max_tokens=12)
    world.settle()
    assert all(engine.finished == {"a": FinishReason.LENGTH} for engine in world.engines)
    assert world.executor(0).num_submitted < 24, "most steps have rows of both"


def test_a_fault_in_one_replica_ends_the_epoch_of_all(world: World) -> None:
    for engine in world.engines:
        engine.add("a", [1, 2, 3], max_tokens=12)
    executor = world.executor(1)
    executor.failing[executor.next_step_id + 3] = False
    world.settle()
    assert all(engine.finished == {"a": FinishReason.LENGTH} for engine in world.engines)
    assert [core_of(world, index)._group.epoch for index in range(2)] == [2, 2]
    statuses = [engine.core.fault_status() for engine in world.engines]
    assert [sum(status.num_recoveries.values()) for status in statuses] == [1, 1]
    assert not any(request.num_faults for request in world.engines[0].scheduler._requests.values())


def test_requests_of_another_replica_are_not_blamed_for_a_fault(world: World) -> None:
    """The same request fails again and again, and ends; the one in the other replica is never suspected."""
    guilty, other = world.engines
    executor = world.executor(0)
    guilty.add("bad", [1, 2, 3], max_tokens=30)
    other.add("good", [4, 5], max_tokens=40)
    for _ in range(6):
        executor.failing[executor.next_step_id + 1] = False
        seen = len(executor.recoveries)
        while len(executor.recoveries) == seen and "bad" not in guilty.finished:
            assert world.turn()
    world.settle()
    assert guilty.finished == {"bad": FinishReason.ERROR}
    assert other.finished == {"good": FinishReason.LENGTH} and len(other.outputs["good"]) == 40


def test_while_a_core_is_away_requests_wait_and_then_go_on(world: World) -> None:
    first = world.engines[0]
    first.add("a", [1, 2, 3], max_tokens=20)
    while len(first.outputs["a"]) < 5:
        assert world.turn()
    world.restart(1)
    world.settle()
    assert first.finished == {"a": FinishReason.LENGTH} and world.executor(0).recoveries


def test_a_replica_that_does_not_come_back_ends_the_waiting_core(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(world, 0)
    now = 0.0
    monkeypatch.setattr("inflight.engine.lockstep.core.time.monotonic", lambda: now)
    core._group.link_lost(1)
    seconds = core._fault_tolerance.engine_recovery_timeout_sec
    assert core.step() == [] and core._group.missing == [1]
    now += 2 * seconds
    assert core.step() == [], "without requests it waits as long as it takes"
    world.engines[0].add("a", [1, 2, 3], max_tokens=20)
    assert core.step() == []
    now += seconds - 1
    assert core.step() == []
    now += 2
    with pytest.raises(WorkerDiedError, match="replicas 1, which have some of the experts, did not come back within"):
        core.step()
    assert core.is_dead and core.is_in_vain


def test_a_call_of_the_ranks_first_commits_the_steps_in_flight(world: World) -> None:
    """The other replica goes on to take part in them, so the call does not wait for ever."""
    first = world.engines[0]
    first.add("a", [1, 2, 3], max_tokens=20)
    while not core_of(world, 0)._in_flight:
        assert world.turn()
    while world.fibers[0].is_busy:
        assert world.turn()
    world.fibers[0].start(lambda: core_of(world, 0).collective_rpc("timeline_events"))
    while world.fibers[0].is_busy:
        assert world.turn()
    assert not core_of(world, 0)._in_flight
    world.settle()
    assert first.finished == {"a": FinishReason.LENGTH}


def test_a_core_that_hears_of_the_end_of_the_epoch_submits_nothing_more(world: World) -> None:
    core, executor = core_of(world, 0), world.executor(0)
    world.engines[0].add("a", [1, 2, 3], max_tokens=20)
    world.links[0].news.append((1, {"over": core._group.epoch}))
    core._submit_steps()
    assert core._group.phase is Phase.OVER and executor.num_submitted == 0
    world.executor(1).leave()  # that is why the other core has said so
    core_of(world, 1)._group.leave("bad luck")
    world.settle()
    assert world.engines[0].finished == {"a": FinishReason.LENGTH}


class Fuzz:
    """Requests, aborts, faults and ends of cores at random."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.random = Random(seed)
        size = self.random.choice([2, 2, 3, 4])
        options: dict[str, Any] = {
            "depth": self.random.choice([1, 2, 2, 3]),
            "extra_blocks": self.random.choice([0, 4, 40]),
            "max_num_seqs": self.random.choice([1, 4]),
            "max_num_batched_tokens": self.random.choice([8, 64]),
            "num_speculative_tokens": self.random.choice([0, 0, 3]),
            "policy": self.random.choice(["fcfs", "priority"]),
        }
        self.rates = [self.random.choice([0.0, 0.02, 0.3]) for _ in range(size)]
        self.has_faults = self.random.random() < 0.6
        self.num_added = 0
        self.is_ending = False
        self.world = World(size, self.random, patch, self.on_plan, **options)

    def on_plan(self, replica: int) -> None:
        engine = self.world.engines[replica] if replica < len(self.world.engines) else None
        if engine is None or self.is_ending:
            return
        if self.random.random() < self.rates[replica]:
            self.add(replica)
        running = [each for each in engine.wanted if each not in engine.finished and each not in engine.aborted]
        if running and self.random.random() < 0.02:
            engine.abort(self.random.choice(running))

    def add(self, replica: int) -> None:
        engine, random = self.world.engines[replica], self.random
        self.num_added += 1
        prompt = [random.randrange(VOCAB_SIZE) for _ in range(random.choice([1, 3, 12, 30]))]
        grammar = str(random.randrange(5)) if random.random() < 0.2 else None
        engine.add(
            f"r{self.num_added}",
            prompt,
            max_tokens=random.choice([1, 4, 20]),
            priority=random.randrange(3),
            grammar=grammar,
        )

    def disturb(self) -> None:
        replica = self.random.randrange(self.world.size)
        if self.random.random() < 0.02:
            self.add(replica)
        if not self.has_faults:
            return
        executor = self.world.executor(replica)
        if self.random.random() < 0.003:
            executor.failing[executor.next_step_id + self.random.randrange(3)] = self.random.random() < 0.5
        if self.random.random() < 0.001:
            self.world.restart(replica)

    def run(self) -> None:
        world = self.world
        while world.num_steps < STEPS_OF_A_WORLD:
            world.num_turns = 0
            self.disturb()
            if not world.turn():
                self.add(self.random.randrange(world.size))
        self.is_ending = True
        for index in range(world.size):
            world.executor(index).failing.clear()
        world.settle()
        for engine in world.engines:
            assert set(engine.wanted) == set(engine.finished) | engine.aborted
        world.close()


def test_fuzz_no_replica_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    num_steps = 0
    seed = 0
    while num_steps < NUM_STEPS:
        fuzz = Fuzz(seed, monkeypatch)
        try:
            fuzz.run()
        except BaseException as error:
            error.add_note(f"with the seed {seed}")
            raise
        num_steps += fuzz.world.num_steps
        seed += 1
