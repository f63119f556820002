"""Pipeline stages work at the same time: stages that sleep, over links that delay, in the real engine."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from benchmarks.overlap.fixed_stages import VOCAB_SIZE, Layout, decode_request, make_engine
from benchmarks.overlap.pipeline_overlap import measure

NUM_REQUESTS = 12
PHASES = {"prepare", "receive", "forward"}


@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_of_a_fixed_time_overlap(num_stages: int) -> None:
    """Each stage computes a step while the next stage computes the step before it. How much time this saves is measured by
    `benchmarks.pipeline_overlap`; here the machine may be busy."""
    stagger = 3 * num_stages // 2
    layout = Layout(name="", num_stages=num_stages, stagger=stagger, depth=stagger + 1)
    core, executor = make_engine(layout, NUM_REQUESTS)
    tokens: dict[str, list[int]] = defaultdict(list)

    def step() -> None:
        for output in core.step():
            tokens[output.request_id].extend(output.new_token_ids)

    try:
        for index in range(NUM_REQUESTS):
            core.add_request(*decode_request(index, max_tokens=900))
        measured = measure(core, executor, step, num_steps=36)
    finally:
        core.close()
    stages = [
        {event.step_id: event for event in events if event.phase == "forward"}
        for process, events in sorted(measured.events.items())
        if process != "engine"
    ]
    assert len(stages) == num_stages
    for stage, following in itertools.pairwise(stages):
        pairs = [(stage[step_id + 1], event) for step_id, event in following.items() if step_id + 1 in stage]
        together = [after.start_ns < before.end_ns and before.start_ns < after.end_ns for after, before in pairs]
        assert sum(together) > 18, f"{sum(together)} of {len(together)} steps are computed beside the step before"
    ranks = [{event.phase for event in events} for process, events in measured.events.items() if process != "engine"]
    assert ranks == [PHASES | {"send"}] * (num_stages - 1) + [PHASES | {"sample", "drain"}]
    assert {event.phase for event in measured.events["engine"]} == {"plan", "wait", "commit"}
    for index in range(NUM_REQUESTS):
        first = 10 * index + 8
        assert len(tokens[str(index)]) > 60 // stagger
        assert tokens[str(index)] == [token % VOCAB_SIZE for token in range(first, first + len(tokens[str(index)]))]
