"""The clock of the parts of a step, and the least time that each part needs."""

from __future__ import annotations

import pytest

from benchmarks.shared.models import SHAPES
from benchmarks.speed.roofline import Machine, Needs
from benchmarks.speed.step_profile import FORWARD, SAMPLE, WAITING, StepClock, least_seconds, shares_of
from inflight.config.parse_architecture import parse_architecture

MACHINE = Machine(num_threads=2, read=31.2e9, read_huge_pages=33.8e9, fp32=230e9, bf16=448e9, int8=890e9)
ARCHITECTURE = parse_architecture({"architectures": ["Qwen3ForCausalLM"], **SHAPES["qwen3-0.6b"].fields})
NEEDS = Needs.of(ARCHITECTURE)


def test_a_nested_call_counts_once() -> None:
    now = iter(range(0, 10_000, 10))
    clock = StepClock(lambda: next(now))
    inner = clock.timed("inner", lambda: None)
    outer = clock.timed(FORWARD, lambda: (inner(), inner()))
    sample = clock.timed(SAMPLE, lambda: None)
    inner()  # no step yet: not counted
    for _ in range(3):
        clock.begin_step(8, 8)
        outer()
        sample()
    step = clock.steps[0]
    assert step.nanoseconds == {"inner": 20, FORWARD: 30, SAMPLE: 10}
    assert step.calls == {"inner": 2, FORWARD: 1, SAMPLE: 1}
    steady = {share.kind: share.seconds for share in shares_of(clock.steps, is_steady=True)}
    assert steady == pytest.approx({FORWARD: 30e-9, "inner": 20e-9, SAMPLE: 10e-9, WAITING: 30e-9})
    alone = {share.kind: share.seconds for share in shares_of(clock.steps, is_steady=False)}
    assert alone[WAITING] == pytest.approx(20e-9)


def test_the_parts_of_a_step_need_what_the_step_needs() -> None:
    decode = least_seconds(ARCHITECTURE, MACHINE, "bf16", tokens=8, rows=8, prompt=100)
    cached, pairs = 800, 800
    whole = NEEDS.step_seconds(MACHINE, "bf16", tokens=8, rows=8, cached=cached, pairs=pairs)
    assert sum(decode.values()) == pytest.approx(whole)
    prefill = least_seconds(ARCHITECTURE, MACHINE, "bf16", tokens=1024, rows=1, prompt=0)
    whole = NEEDS.step_seconds(MACHINE, "bf16", tokens=1024, rows=1, cached=0, pairs=1024**2 / 2)
    assert sum(prefill.values()) == pytest.approx(
        whole, rel=0.01
    )  # but for the head, which reads its weights for one row


def test_the_least_time_of_experts_is_that_of_those_which_are_read() -> None:
    mixture = parse_architecture({"architectures": ["Qwen3MoeForCausalLM"], **SHAPES["moe-a"].fields})
    one, many = (
        least_seconds(mixture, MACHINE, "bf16", tokens=count, rows=count, prompt=10)["experts"] for count in (1, 64)
    )
    weights = 16 * 1024 * (8 * 3 * 384 + 64)  # of the chosen experts and the router
    assert one == pytest.approx(2 * weights / MACHINE.bandwidth)
    assert 7 * one < many < 8 * one
