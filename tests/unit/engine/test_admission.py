"""`Admission`: what counts as waiting, between two reports of the engine."""

from __future__ import annotations

import pytest

from inflight.engine.admission import MAX_SEQUENCES, Admission, QueueLimits
from inflight.engine.input_processor import ProcessedRequest
from inflight.errors import InvalidRequestError, OverloadedError
from inflight.interface.statistics import SchedulerStats
from tests.unit.engine.test_output_processor import request


def of(num_tokens: int, n: int = 1) -> ProcessedRequest:
    return request(prompt=[7] * num_tokens, n=n)


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
        admission.sent(of(600))
    admission.check(4, 10**6)  # nothing waits yet, however long its prompts are
    admission.sent(of(600))  # this does
    admission.check(3, 400)
    with pytest.raises(OverloadedError, match="600 of 1000 prompt tokens wait, and this request has 401"):
        admission.check(1, 401)
    with pytest.raises(OverloadedError, match="1 of 4 sequences wait"):
        admission.check(4, 0)


def test_a_report_counts_what_it_knows_and_what_was_sent_after_it() -> None:
    admission = Admission(QueueLimits(max_queued_tokens=1000), max_num_seqs=4)
    for _ in range(3):
        admission.sent(of(300, n=2))
    with pytest.raises(OverloadedError, match="300 of 1000 prompt tokens"):
        admission.check(1, 701)
    admission.reported(stats(1, 0, 0), 2)  # the last slot but one is free: it takes none of n=2 but the next one
    with pytest.raises(OverloadedError, match="300 of 1000 prompt tokens"):
        admission.check(1, 701)
    admission.reported(stats(3, 1, 50), 4)  # one waits: what came after it does, too
    with pytest.raises(OverloadedError, match="350 of 1000 prompt tokens"):
        admission.check(1, 651)
    admission.reported(stats(4, 2, 40), 6)
    admission.check(1, 960)
    admission.reported(stats(0, 0, 0), 6)
    admission.check(MAX_SEQUENCES, 10**6)


def test_the_bound_of_waiting_sequences_holds_for_an_idle_engine() -> None:
    admission = Admission(QueueLimits(max_queued_requests=4), max_num_seqs=3)
    admission.check(7, 0)
    with pytest.raises(
        InvalidRequestError, match=r"8 sequences \(prompts times n\) in one request; at most 7 are allowed"
    ):
        admission.check(8, 0)
    admission.sent(of(1))
    admission.check(6, 0)
    with pytest.raises(OverloadedError, match="0 of 4 sequences wait, and this request has 7") as caught:
        admission.check(7, 0)
    assert caught.value.retry_after_seconds >= 1


def test_sequences_of_one_request_are_bounded_without_limits_too() -> None:
    for limits in (QueueLimits(), QueueLimits(max_queued_requests=10**6)):
        admission = Admission(limits, max_num_seqs=256)
        admission.check(MAX_SEQUENCES, 0)
        with pytest.raises(InvalidRequestError, match=r"32768 sequences .* at most 1024"):
            admission.check(256 * 128, 0)
