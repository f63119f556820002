"""`EngineCore` at every depth and stagger: whatever the schedule, and whatever fails, the tokens are the same.

`MockEngine` checks the rest as it happens: blocks, slots and queues after every event, each token as it comes out, each plan.
"""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.errors import StepError
from tests.mock_engine import MAX_MODEL_LEN, MockEngine

FULL = os.environ.get("INFLIGHT_TEST_FULL") == "1"


@st.composite
def engines(draw: st.DrawFn) -> MockEngine:
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    chunked = draw(st.booleans())
    max_num_seqs = draw(st.integers(1, 5))
    return MockEngine(
        block_size=block_size,
        windows=tuple(draw(st.lists(st.sampled_from([None, 1, 3, 7, 16]), min_size=1, max_size=4))),
        extra_blocks=draw(st.sampled_from([0, 0, 3, 10, 60])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 40)) if chunked else MAX_MODEL_LEN,
        chunked=chunked,
        caching=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        depth=draw(st.integers(1, 4)),
        stagger=draw(st.integers(1, 3)),
        num_speculative_tokens=draw(st.sampled_from([0, 0, 1, 3])),
    )


# few distinct beginnings, so that prompts share blocks
PROMPTS = st.builds(
    lambda a, b, tail: [a] * b + tail,
    st.integers(0, 2),
    st.integers(1, 30),
    st.lists(st.integers(0, 3), max_size=20),
)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["add", "add", "grammar", "grammar", "fork", "abort", "fail", "late", "preempt", "reset", *["step"] * 5]
        ),
        PROMPTS,
        st.integers(1, 24),
        st.integers(0, 9),
    ),
    min_size=3,
    max_size=30,
)


@settings(max_examples=2000 if FULL else 250)
@given(engine=engines(), events=EVENTS)
def test_any_schedule_gives_the_same_tokens(engine: MockEngine, events: list[tuple[str, list[int], int, int]]) -> None:
    """An event's number chooses: who is aborted or preempted, which step fails, how many steps run unasked."""
    for i, (kind, prompt, max_tokens, number) in enumerate(events):
        stop = frozenset(range(number * 2)) if number % 3 == 0 else frozenset()
        if kind == "add":
            salt = "a" if number == 1 else ""
            logprobs = number % 4 == 0
            engine.add(f"r{i}", prompt, max_tokens, stop=stop, priority=number, salt=salt, prompt_logprobs=logprobs)
        elif kind == "grammar":
            grammar = "bad" if number == 0 else str(10 * i + number)
            engine.add(f"r{i}", prompt, max_tokens, stop=stop, priority=number, grammar=grammar)
        elif kind == "fork":
            grammar = str(10 * i) if number % 2 else None
            for child in range(3):
                leader = f"r{i}c0" if child else None
                engine.add(
                    f"r{i}c{child}",
                    prompt,
                    max_tokens + child,
                    stop=stop,
                    priority=number,
                    leader=leader,
                    grammar=grammar,
                )
        elif kind == "abort" and engine.wanted:
            engine.abort(sorted(engine.wanted)[number % len(engine.wanted)])
        elif kind == "fail":
            engine.executor.failing[engine.executor.next_step_id + number // 2 - 2] = number % 2 == 0
        elif kind == "preempt" and engine.scheduler.num_running:
            running = engine.scheduler._running
            engine.scheduler._preempt(running[number % len(running)])
            engine.scheduler.check_integrity()
        elif kind == "late":
            for _ in range(number % 4):
                engine.executor.run_next()
        elif kind == "reset":
            engine.core.reset_prefix_cache()
            engine.scheduler.check_integrity()
        else:
            step(engine)
    for _ in range(10_000):
        if not engine.core.has_unfinished_requests():
            break
        step(engine)
    engine.run()


def step(engine: MockEngine) -> None:
    """One step; one that fails leaves nothing in flight."""
    oldest = engine.core._in_flight[0][0].step_id if engine.core._in_flight else engine.executor.next_step_id
    try:
        engine.step()
    except StepError:
        assert oldest in engine.executor.failing and not engine.core._in_flight
