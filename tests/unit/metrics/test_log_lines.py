"""The lines about the engine and about requests: when they are written, and what they never hold."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

import pytest

from inflight.interface.statistics import SchedulerStats, StepCounts
from inflight.metrics.log_lines import RequestLog, StatsLog, describe
from inflight.sampling_params import SamplingParams
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.support.virtual_time import VirtualTimeLoop
from tests.unit.metrics.observed import finished, stats

IDLE = SchedulerStats(step_id=9, num_running=0, num_waiting=0, num_waiting_tokens=0, kv_cache_usage=0.0)
CANARY = dataclasses.replace(IDLE, counts=StepCounts(num_queried_tokens=1, num_sampled_tokens=1))
ONE_STEP = dataclasses.replace(IDLE, counts=StepCounts(num_queried_tokens=5, num_sampled_tokens=1))


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_a_line_each_interval_while_there_is_work_and_one_when_idle(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        log = StatsLog(0.05)
        for report in (IDLE, CANARY, CANARY):
            log.stats_changed(report)
        await asyncio.sleep(0.12)
        assert caplog.messages == [], "an idle engine, whose readiness is tested"
        log.stats_changed(stats())
        await asyncio.sleep(0.18)  # the work goes on without a report: a long step
        while_busy = len(caplog.messages)
        assert while_busy >= 2
        assert all("3 requests run, 2 wait" in message for message in caplog.messages)
        assert " 1200.0 prompt tokens/s" in caplog.messages[0]  # 60 in 50 ms
        assert " 0.0 prompt tokens/s" in caplog.messages[1], "counted once"
        log.stats_changed(IDLE)
        await asyncio.sleep(0.2)
        last = caplog.messages[while_busy:]
        assert [message for message in last if "idle" in message] == last[-1:]
        caplog.clear()
        log.stats_changed(ONE_STEP)
        await asyncio.sleep(0.15)
        assert len(caplog.messages) == 1 and "idle" in caplog.messages[0], "a request of one step is work, too"

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(test())


def test_each_of_several_engines_has_its_lines(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        for log in [StatsLog(0.02, engine) for engine in (0, 1, 2)]:
            for engine in (0, 2):
                log.stats_changed(dataclasses.replace(ONE_STEP, engine=engine))
        await asyncio.sleep(0.1)
        assert sorted(message[:10] for message in caplog.messages) == ["engine 0: ", "engine 2: "]

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(test())


def test_what_a_line_says() -> None:
    first = stats(7)
    assert describe(first, first.counts, 10.0) == (
        "3 requests run, 2 wait, 6.0 prompt tokens/s, 0.0 output tokens/s, KV cache 25.0% used, prefix cache hits 40.0%"
    )
    busy = dataclasses.replace(IDLE, shares_cores=True)
    assert describe(busy, StepCounts(), 1.0).endswith(", compute threads wait for cores")
    more = StepCounts(num_sampled_tokens=48, num_forced_tokens=2, num_draft_tokens=8, num_accepted_tokens=6)
    line = describe(IDLE, first.counts + first.counts + more, 2.0)
    assert line.startswith("the engine is idle now, 60.0 prompt tokens/s, 25.0 output tokens/s")
    assert line.endswith("drafts accepted 75.0%")


def test_the_lines_of_a_request_have_numbers_and_no_texts(caplog: pytest.LogCaptureFixture) -> None:
    secret = StructuredOutputsParams(choice=["a secret choice"])
    params = SamplingParams(max_tokens=64, temperature=0.5, seed=3, stop=["a secret stop"], structured_outputs=secret)
    log = RequestLog()
    log.request_started("/v1/completions", "cmpl-1", 10, params)
    log.request_started("/v1/completions", "cmpl-2", 10, SamplingParams())
    log.request_finished(finished("stop", "length", params=params))
    began, plain, ended = caplog.messages
    for part in (
        "cmpl-1",
        "/v1/completions",
        "10 prompt tokens",
        "max_tokens=64",
        "temperature=0.5",
        "seed=3",
        "stop=...",
    ):
        assert part in began
    assert "structured_outputs=..." in began
    assert "secret" not in caplog.text
    assert plain.endswith("10 prompt tokens, default parameters")
    assert ended == (
        "request-1 ended: stop+length, 10 prompt tokens (4 from the prefix cache), 10 output tokens, 2.500 s"
    )
