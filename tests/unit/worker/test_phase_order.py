"""`PhaseOrder`: what goes to the device follows from the commands, keeps every dependency, and goes as soon as it may."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.interface.step import GrammarOutput
from inflight.worker.phase_order import PhaseOrder, StepPhases

NO_STEP = -1
Phase = tuple[str, int]  # ("forward" or "sample", step id)


@dataclass(frozen=True)
class Plan:
    step_id: int
    drawn_in_step: int
    awaits_masks: bool


Command = Plan | int  # a plan, or the masks of a step


class Recorder:
    """Phases run when they are handed over. Each step's masks are known by their row."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.order = PhaseOrder(lambda phase: phase())

    def take(self, command: Command) -> None:
        if isinstance(command, int):
            self.order.provide(command, masks(command))
            return
        self.order.add(
            StepPhases(
                step_id=command.step_id,
                drawn_in_step=command.drawn_in_step,
                awaits_masks=command.awaits_masks,
                forward=lambda: self.phases.append(("forward", command.step_id)),
                sample=partial(self.sample, command),
            )
        )

    def sample(self, plan: Plan, output: GrammarOutput | None) -> None:
        assert (output is not None) == plan.awaits_masks
        assert output is None or output.rows.tolist() == [plan.step_id]
        self.phases.append(("sample", plan.step_id))


def masks(step_id: int) -> GrammarOutput:
    empty = np.empty((0, 0), dtype=np.int32)
    return GrammarOutput(rows=np.array([step_id]), num_masks=np.array([1]), masks=empty)


@st.composite
def command_lists(draw: st.DrawFn) -> list[Command]:
    """Plans with rising ids, some missing; masks behind their plan, in any order."""
    commands: list[Command] = []
    waiting: list[int] = []
    step_id = 0
    for _ in range(draw(st.integers(1, 10))):
        step_id += draw(st.integers(1, 2))
        plan = Plan(step_id, draw(st.integers(NO_STEP, step_id - 1)), draw(st.booleans()))
        commands.append(plan)
        waiting += [step_id] * plan.awaits_masks
        while waiting and draw(st.booleans()):
            commands.append(waiting.pop(draw(st.integers(0, len(waiting) - 1))))
    return commands + draw(st.permutations(waiting))


def may_go(commands: list[Command]) -> set[Phase]:
    """The rules as they are written, to their fixed point."""
    plans = [command for command in commands if isinstance(command, Plan)]
    gone: set[Phase] = set()
    while True:
        before = len(gone)
        for i, plan in enumerate(plans):
            older = plans[:i]
            drawn = all(("sample", other.step_id) in gone for other in older if other.step_id <= plan.drawn_in_step)
            if drawn and all(("forward", other.step_id) in gone for other in older):
                gone.add(("forward", plan.step_id))
            is_masked = not plan.awaits_masks or plan.step_id in commands
            sampled = all(("sample", other.step_id) in gone for other in older)
            if ("forward", plan.step_id) in gone and sampled and is_masked:
                gone.add(("sample", plan.step_id))
        if len(gone) == before:
            return gone


@given(command_lists())
def test_everything_that_may_go_goes_and_nothing_else(commands: list[Command]) -> None:
    recorder = Recorder()
    for i, command in enumerate(commands):
        recorder.take(command)
        assert sorted(recorder.phases) == sorted(may_go(commands[: i + 1]))  # each once
    plans = [command for command in commands if isinstance(command, Plan)]
    place = {phase: i for i, phase in enumerate(recorder.phases)}
    for kind in ("forward", "sample"):
        places = [place[kind, plan.step_id] for plan in plans]  # nothing is left over
        assert places == sorted(places)
    for plan in plans:
        assert place["forward", plan.step_id] < place["sample", plan.step_id]
        drawn = [place["sample", other.step_id] for other in plans if other.step_id <= plan.drawn_in_step]
        assert max(drawn, default=-1) < place["forward", plan.step_id]


@given(command_lists())
def test_ranks_with_the_same_commands_have_the_same_order(commands: list[Command]) -> None:
    """One runs its phases at once, the other when all commands have come."""
    recorder, late = Recorder(), Recorder()
    held: list[Any] = []
    late.order = PhaseOrder(held.append)
    for command in commands:
        recorder.take(command)
        late.take(command)
    for phase in held:
        phase()
    assert recorder.phases == late.phases


def test_a_late_mask_holds_up_its_step_and_what_depends_on_it() -> None:
    recorder = Recorder()
    for plan in (Plan(0, NO_STEP, True), Plan(1, NO_STEP, False), Plan(2, 0, False), Plan(3, NO_STEP, False)):
        recorder.take(plan)
    assert recorder.phases == [("forward", 0), ("forward", 1)]
    recorder.take(0)
    assert recorder.phases[2:] == [
        ("sample", 0),
        ("sample", 1),
        ("forward", 2),
        ("sample", 2),
        ("forward", 3),
        ("sample", 3),
    ]


def test_masks_that_nobody_waits_for_are_a_mistake() -> None:
    recorder = Recorder()
    recorder.take(Plan(0, NO_STEP, True))
    recorder.take(Plan(1, NO_STEP, False))
    for step_id in (1, 5):
        with pytest.raises(AssertionError, match=f"step {step_id}"):
            recorder.take(step_id)
