"""After Ctrl-C at any moment of `LLM.generate` and `LLM.chat`, the `LLM` still gives right answers.

Python raises KeyboardInterrupt only in the main thread, between any two of its instructions.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import inflight
from inflight import LLM, SamplingParams
from inflight.entrypoints.replicated_engine import ReplicatedEngine
from inflight.outputs import RequestOutput
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.e2e.text_model import text_config, with_tokenizer
from tests.support.model_zoo import write_model
from tests.support.waits import wait_until
from tests.unit.structured_output.grammar_case import PERSON

NUM_MOMENTS = 500 if os.environ.get("INFLIGHT_TEST_FULL") == "1" else 8
HOME = str(Path(inflight.__file__).parent)
Line = tuple[str, int]  # a file, and the number of a line in it

COMMON: dict[str, Any] = {"temperature": 0.8, "max_tokens": 10, "ignore_eos": True}
PERSON_GRAMMAR = StructuredOutputsParams(json=PERSON, disable_any_whitespace=True)
PROMPTS = ["Tell me a story about a fox. " * 3, "Once upon a time", "Mia is 34. As JSON:", "a b a b a b a b"]
PARAMS = [
    SamplingParams(**COMMON, seed=1, n=2, logprobs=2),
    SamplingParams(**COMMON, seed=2, stop=["~"], prompt_logprobs=1),
    SamplingParams(**{**COMMON, "ignore_eos": False, "max_tokens": 40}, seed=3, structured_outputs=PERSON_GRAMMAR),
    SamplingParams(**{**COMMON, "temperature": 0.0}),
]
ENGINES: dict[str, dict[str, Any]] = {
    "one rank": {"max_num_batched_tokens": 48},
    "two processes": {
        "pipeline_parallel_size": 2,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
    },
    "two replicas": {"data_parallel_size": 2, "num_threads": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_model(text_config(256), tmp_path_factory.mktemp("interrupts") / "model", seed=0)
    return with_tokenizer(made)


def start(folder: Path, case: str) -> LLM:
    fixed: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 20, "generation_config": "none"}
    return LLM(str(folder), **fixed, **ENGINES[case])


@pytest.mark.parametrize("case", ENGINES)
def test_after_an_interrupt_at_any_moment_answers_are_right(folder: Path, case: str) -> None:
    """Some interrupts come in pairs. The second one may come while the first one is handled."""
    rng = random.Random(0)
    num_raised = 0
    with start(folder, case) as llm:
        truth = generate(llm)
        seconds = min(seconds_of(lambda: generate(llm)) for _ in range(3))  # one may wait for a core
        for moment in range(NUM_MOMENTS):
            delays = [rng.uniform(0.0, seconds) for _ in range(1 + moment % 2)]
            num_raised += interrupted_after(delays, lambda: generate(llm))
            assert generate(llm) == truth, moment
            check_rest(llm)
        assert num_raised > 0


def test_after_an_interrupt_in_any_line_of_the_caller_answers_are_right(folder: Path) -> None:
    with start(folder, "one rank") as llm:
        truth = chat(llm)
        counts: Counter[Line] = Counter()
        with seeing_lines(counts):
            chat(llm)
        for line in counts:
            with pytest.raises(KeyboardInterrupt), seeing_lines(Counter(), line):
                chat(llm)
            assert chat(llm) == truth, line
            check_rest(llm)


def seconds_of(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def generate(llm: LLM) -> list[Any]:
    return results(llm.generate(PROMPTS, PARAMS))


def chat(llm: LLM) -> list[Any]:
    return results(llm.chat([{"role": "user", "content": "Who are you?"}], PARAMS[0]))


def results(outputs: list[RequestOutput]) -> list[Any]:
    return [[(each.token_ids, each.text) for each in output.outputs] for output in outputs]


def check_rest(llm: LLM) -> None:
    if isinstance(llm._engine, ReplicatedEngine):
        assert not llm._engine._reading and not llm._engine._engine._requests
        for engine in llm._engine._engine._replicas.engines:
            wait_until(lambda: (stats := engine.admission._stats) is None or not stats.num_running + stats.num_waiting)  # noqa: B023
        return
    scheduler = llm.llm_engine.core.scheduler
    scheduler.check_integrity()
    assert not scheduler.has_unfinished_requests() and not llm.llm_engine.has_unfinished_requests()


def interrupted_after(delays: list[float], call: Callable[[], object]) -> bool:
    """Returns whether an interrupt has ended the call."""
    is_running = True

    def handle(number: int, frame: FrameType | None) -> None:
        if is_running:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, handle)
    timers = [
        threading.Timer(delay, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]) for delay in delays
    ]
    try:
        for timer in timers:
            timer.start()
        call()
    except KeyboardInterrupt:
        return True
    finally:
        is_running = False
        for timer in timers:
            timer.join()
        signal.signal(signal.SIGINT, previous)
    return False


@contextmanager
def seeing_lines(counts: Counter[Line], wanted: Line | None = None) -> Iterator[None]:
    """Count the lines of inflight/ that this thread runs. Raise KeyboardInterrupt when it comes to the line `wanted`."""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(HOME):
            return None
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            counts[line] += 1
            if line == wanted:
                raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(previous)
