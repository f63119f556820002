"""`ReadinessCheck`: when silence means that the engine hangs."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from inflight.engine.serving.readiness import FRESH_SECONDS, ReadinessCheck
from inflight.errors import EngineError, ErrorKind
from inflight.interface.request import EngineCoreOutput, FinishReason
from inflight.interface.statistics import SchedulerStats
from tests.support.virtual_time import VirtualTimeLoop


def end(reason: FinishReason, error: str = "") -> list[EngineCoreOutput]:
    return [EngineCoreOutput(request_id="canary", new_token_ids=(), finish_reason=reason, error=error)]


def stats(step_id: int) -> SchedulerStats:
    return SchedulerStats(step_id=step_id, num_running=1, num_waiting=0, num_waiting_tokens=0, kv_cache_usage=0.0)


def no_canary() -> str:
    raise AssertionError("requests are there")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock: `now[0]`."""
    found = [1000.0]
    # the clock of this module only: threads that earlier tests have left keep theirs
    monkeypatch.setattr("inflight.engine.serving.readiness.time", SimpleNamespace(monotonic=lambda: found[0]))
    return found


def check(readiness: ReadinessCheck, busy_since: float) -> None:
    coroutine = readiness.check(no_canary, busy_since)
    with pytest.raises(StopIteration):  # it never waits
        coroutine.send(None)


def test_an_engine_that_was_idle_has_its_time_from_the_first_request_on(now: list[float]) -> None:
    readiness = ReadinessCheck(60.0)
    readiness.record(end(FinishReason.STOP), None)
    now[0] += 3600
    check(readiness, now[0])
    now[0] += 59
    check(readiness, now[0] - 59)
    now[0] += 2
    with pytest.raises(EngineError, match="no step for 61 s"):
        check(readiness, now[0] - 61)


def test_a_step_without_outputs_is_one(now: list[float]) -> None:
    readiness = ReadinessCheck(60.0)
    for step_id in range(10):  # pieces of a long prompt
        now[0] += 50
        readiness.record((), stats(step_id))
        check(readiness, 1000.0)
    now[0] += 50
    readiness.record((), stats(9))
    now[0] += 11
    with pytest.raises(EngineError, match="no step for 61 s"):
        check(readiness, 1000.0)


def failure(error: str) -> list[EngineCoreOutput]:
    return [
        EngineCoreOutput(
            request_id="r", new_token_ids=(), finish_reason=FinishReason.ERROR, error=error, error_kind=ErrorKind.ENGINE
        )
    ]


def canary() -> str:
    raise AssertionError("a canary is sent")


def test_an_engine_whose_steps_fail_is_not_ready_though_each_failure_leaves_it_idle(now: list[float]) -> None:
    readiness = ReadinessCheck(60.0)
    readiness.record((), stats(1))
    check(readiness, now[0])
    for _ in range(3):
        readiness.record(failure("bad luck"), stats(1))
        now[0] += 0.1
        with pytest.raises(EngineError, match="the last step failed: bad luck"):
            check(readiness, now[0])  # requests have come since
        with pytest.raises(AssertionError, match="a canary is sent"):  # an idle engine has to prove it
            readiness.check(canary, None).send(None)
    readiness.record(failure("worse"), stats(2))  # a step and a failure came as one: the failure may be the later one
    with pytest.raises(EngineError, match="worse"):
        check(readiness, now[0])
    readiness.record((), stats(3))
    check(readiness, now[0])
    now[0] += 11
    check(readiness, now[0] - 1)  # the failure is forgotten


def run(test: Callable[[], Awaitable[None]]) -> list[str]:
    """What asyncio had to complain of."""
    complaints: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
        await test()
        gc.collect()
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())
    return complaints


def test_a_canary_that_could_not_be_sent_is_sent_again() -> None:
    async def test() -> None:
        readiness = ReadinessCheck(5.0)

        def fails() -> str:
            raise EngineError("not now")

        for _ in range(2):
            with pytest.raises(EngineError, match="not now"):
                await readiness.check(fails, None)

        def answers() -> str:
            asyncio.get_running_loop().call_soon(readiness.record, end(FinishReason.LENGTH), None)
            return "canary"

        await readiness.check(answers, None)

    assert not run(test)


def test_a_canary_that_fails_says_so_to_whoever_waits_still() -> None:
    async def test() -> None:
        readiness = ReadinessCheck(0.02)
        with pytest.raises(EngineError, match=r"within 0\.02 s"):
            await readiness.check(lambda: "canary", None)
        readiness.record(end(FinishReason.ERROR, "a defect"), None)  # nobody waits
        later = asyncio.get_running_loop().call_later

        def fails() -> str:
            later(0.0, readiness.record, end(FinishReason.ERROR, "a defect"), None)
            return "canary"

        for _ in range(2):  # a failed step is none
            with pytest.raises(EngineError, match="makes no steps: a defect"):
                await readiness.check(fails, None)

    assert not run(test)


def test_a_young_step_is_enough(now: list[float]) -> None:
    readiness = ReadinessCheck(1.0)
    readiness.record((), stats(0))
    now[0] += FRESH_SECONDS - 1
    check(readiness, 1000.0)
