"""`Admission`: what counts as waiting, between two reports of the engine. `Drain`: who may still come, and when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.engine.serving.admission import Admission, Drain, QueueLimits
from inflight.engine.serving.output_lengths import FIRST_LENGTH
from inflight.errors import ConfigError, EngineClosedError, InvalidRequestError, OverloadedError
from inflight.interface.statistics import SchedulerStats
from tests.support.refusals import refused
from tests.support.virtual_time import VirtualTimeLoop


def stats(num_running: int, num_waiting: int, num_waiting_tokens: int) -> SchedulerStats:
    return SchedulerStats(
        step_id=0,
        num_running=num_running,
        num_waiting=num_waiting,
        num_waiting_tokens=num_waiting_tokens,
        kv_cache_usage=0.0,
    )


def test_what_free_slots_take_does_not_wait() -> None:
    admission = Admission(QueueLimits(max_queued_requests=4, max_queued_tokens=1000), max_num_seqs=3)
    for _ in range(3):
        admission.check(1, 600)
        admission.sent(1, 600)
    admission.check(4, 10**6)  # nothing waits yet, however long its prompts are
    admission.sent(1, 600)  # this does
    admission.check(3, 400)
    with pytest.raises(
        OverloadedError, match="600 prompt tokens wait, at most 1000 may wait, and this request would add 401"
    ):
        admission.check(1, 401)
    with pytest.raises(OverloadedError, match="1 sequences wait, at most 4"):
        admission.check(4, 0)


def test_a_report_counts_what_it_knows_and_what_was_sent_after_it() -> None:
    admission = Admission(QueueLimits(max_queued_tokens=1000), max_num_seqs=4)
    for _ in range(3):
        admission.sent(2, 300)
    with pytest.raises(OverloadedError, match="300 prompt tokens wait, at most 1000"):
        admission.check(1, 701)
    admission.reported(stats(1, 0, 0), 2)  # the last slot but one is free: it takes none of n=2 but the next one
    with pytest.raises(OverloadedError, match="300 prompt tokens wait, at most 1000"):
        admission.check(1, 701)
    admission.reported(stats(3, 1, 50), 4)  # one waits: what came after it does, too
    with pytest.raises(OverloadedError, match="350 prompt tokens wait, at most 1000"):
        admission.check(1, 651)
    admission.reported(stats(4, 2, 40), 6)
    admission.check(1, 960)
    admission.reported(stats(0, 0, 0), 6)
    admission.check(2000, 10**6)


def test_free_slots_do_not_count_while_sequences_wait() -> None:
    """The KV cache is full: 4 of 100 slots are in use, and the next sequences wait behind those that wait already."""
    admission = Admission(QueueLimits(max_queued_requests=10, max_queued_tokens=1000), max_num_seqs=100)
    admission.reported(stats(4, 9, 900), 0)
    admission.sent(1, 50)
    with pytest.raises(OverloadedError, match="10 sequences wait, at most 10 may wait"):
        admission.check(1, 0)
    admission.reported(stats(4, 8, 900), 0)
    with pytest.raises(OverloadedError, match="950 prompt tokens wait, at most 1000"):
        admission.check(1, 51)


def test_the_bound_of_waiting_sequences_holds_for_an_idle_engine() -> None:
    admission = Admission(QueueLimits(max_queued_requests=4), max_num_seqs=3)
    admission.check(7, 0)
    with refused("", "8 sequences", "at most 7"):
        admission.check(8, 0)
    admission.sent(1, 1)
    admission.check(6, 0)
    with pytest.raises(OverloadedError, match=r"0 .* 4 .* 7") as caught:
        admission.check(7, 0)
    assert caught.value.retry_after_seconds >= 1


def test_sequences_of_one_call_are_bounded_where_a_server_says_so() -> None:
    Admission(QueueLimits(), max_num_seqs=1).check(10**6, 10**9)
    for most in (None, 10**6):
        admission = Admission(QueueLimits(max_queued_requests=most, max_call_sequences=1024), max_num_seqs=256)
        admission.check(1024, 0)
        with pytest.raises(InvalidRequestError, match=r"32768 sequences .* at most 1024"):
            admission.check(256 * 128, 0)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "4"])
@pytest.mark.parametrize("name", ["max_queued_requests", "max_queued_tokens", "max_call_sequences"])
def test_limits_are_numbers_above_zero(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value!r}"):
        QueueLimits(**{name: value})
    assert QueueLimits(**{name: 1}) != QueueLimits(**{name: None}) == QueueLimits()


def retry_after(admission: Admission, *, num_tokens: int = 0) -> int:
    with pytest.raises(OverloadedError) as caught:
        admission.check(4, num_tokens)
    return caught.value.retry_after_seconds


@pytest.mark.parametrize(
    ("ends", "now", "num_waiting", "seconds"),
    [
        ([], 100.0, 8, 1),
        ([0.0], 100.0, 8, 1),  # one end has no rate
        ([0.0, 4.0], 10.0, 8, 60),  # one end in 10 s, so 80 s, of which at most 60 are told
        ([0.0, 1.0, 2.0, 3.0, 4.0], 4.0, 8, 8),
        ([0.0, 1.0, 2.0, 3.0, 4.0], 4.0, 9, 9),
        ([1.0, 2.0, 3.0, 4.0], 7.0, 8, 16),
        ([1.0, 1.1, 1.2, 1.3], 1.4, 8, 2),  # 1.07 s
        ([5.0, 5.0], 5.0, 8, 1),
        ([-1000.0] * 64 + [0.0] * 32 + [8.0] * 32, 9.0, 8, 2),  # only the last 64: 63 of them in 9 s
    ],
)
def test_when_to_come_back_is_told_by_the_rate_at_which_requests_end(
    monkeypatch: pytest.MonkeyPatch, ends: list[float], now: float, num_waiting: int, seconds: int
) -> None:
    times = iter([*ends, now])
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr("inflight.engine.serving.admission.time", clock)
    admission = Admission(QueueLimits(max_queued_requests=11), max_num_seqs=4)
    for _ in ends:
        admission.ended()
    admission.reported(stats(4, num_waiting, 99), 0)
    assert retry_after(admission) == seconds


def test_when_to_come_back_with_too_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 2.0, 2.0])
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr("inflight.engine.serving.admission.time", clock)
    admission = Admission(QueueLimits(max_queued_tokens=100), max_num_seqs=4)
    for _ in range(3):
        admission.ended()
    admission.reported(stats(4, 5, 99), 0)
    admission.check(4, 1)
    assert retry_after(admission, num_tokens=2) == 5


def test_the_load_is_what_is_reported_and_what_was_sent_since() -> None:
    admission = Admission(QueueLimits(), max_num_seqs=4)
    assert admission.load == 0
    admission.sent(2, 300, 700)
    admission.sent(1, 50, 60)
    assert admission.load == 760
    reported = 75 + 3 * FIRST_LENGTH
    admission.reported(replace(stats(2, 1, 70), num_running_tokens=5), 1)  # a part of the first request has arrived
    assert admission.load == reported + 760
    admission.reported(replace(stats(2, 1, 70), num_running_tokens=5), 2)
    assert admission.load == reported + 60
    admission.reported(stats(0, 0, 0), 3)
    assert admission.load == 0


def test_a_new_engine_has_an_empty_queue() -> None:
    admission = Admission(QueueLimits(max_queued_requests=4, max_queued_tokens=100), max_num_seqs=2)
    admission.sent(3, 70)
    admission.reported(stats(2, 4, 90), 1)
    with pytest.raises(OverloadedError):
        admission.check(1, 1)
    admission.restarted()
    assert admission.load == 0
    admission.check(6, 10**6)
    with pytest.raises(InvalidRequestError, match="at most 6"):
        admission.check(7, 1)
    admission.sent(3, 70)
    with pytest.raises(OverloadedError, match="70 prompt tokens wait"):
        admission.check(1, 31)
    admission.check(1, 30)
    admission.reported(stats(0, 0, 0), 3)
    assert admission.load == 0


# -- drain ---------------------------------------------------------------------------------------------------------------

LONG = 20.0  # seconds that no test may wait out


def run(test: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        loop = runner.get_loop()
        start = loop.time()
        runner.run(test())  # type: ignore[arg-type]
        assert loop.time() - start < LONG / 2, "a drain waited for its time instead of its last request"


def test_with_nothing_to_wait_for_it_ends_at_once() -> None:
    async def test() -> None:
        drain = Drain()
        drain.check_new()
        drain.check_submit()
        await drain.run(LONG)
        assert drain.has_begun
        for check in (drain.check_new, drain.check_submit):
            with pytest.raises(EngineClosedError, match="accepts no more requests"):
                check()

    run(test)


def test_it_ends_with_the_last_of_those_that_run() -> None:
    async def test() -> None:
        drain = Drain()
        drain.record_running(2)
        drained = asyncio.create_task(drain.run(LONG))
        await asyncio.sleep(0)
        drain.record_running(1)
        await asyncio.sleep(0.01)
        assert not drained.done()
        drain.record_running(0)
        await drained

    run(test)


def test_it_ends_with_what_was_accepted_and_never_submitted() -> None:
    async def test() -> None:
        drain = Drain()
        with drain.accepted():
            with drain.accepted():
                drained = asyncio.create_task(drain.run(LONG))
                await asyncio.sleep(0)
                drain.check_submit()  # accepted before: it may still come
                with pytest.raises(EngineClosedError):
                    drain.check_new()
            await asyncio.sleep(0.01)
            assert not drained.done()
        with pytest.raises(EngineClosedError):
            drain.check_submit()
        await drained

    run(test)


def test_what_is_accepted_counts_until_it_runs_and_then_until_it_ends() -> None:
    async def test() -> None:
        drain = Drain()
        with drain.accepted():
            drained = asyncio.create_task(drain.run(LONG))
            await asyncio.sleep(0)
            drain.record_running(1)
            drain.record_running(0)  # another one has ended meanwhile
            await asyncio.sleep(0.01)
            assert not drained.done()
            drain.record_running(1)
        await asyncio.sleep(0.01)
        assert not drained.done()
        drain.record_running(0)
        await drained

    run(test)


def test_when_its_time_is_over_nothing_is_submitted_any_more() -> None:
    async def test() -> None:
        drain = Drain()
        drain.record_running(1)
        with drain.accepted():
            with pytest.raises(TimeoutError):
                await drain.run(0.01)
            with pytest.raises(EngineClosedError):
                drain.check_submit()

    run(test)
