"""The two waves of a meeting, and what ends its waits."""

from __future__ import annotations

import threading
import time

import pytest

from inflight.errors import EngineClosedError, RankError, WorkerDiedError
from inflight.executor.meeting import Meeting
from inflight.interface.messages import WorkerFailure
from inflight.interface.start_up import Listening, Ready, StartUpFailed


def listening(rank: int) -> Listening:
    return Listening(rank=rank, epoch=3, address=("127.0.0.1", 100 + rank), num_dropped=0)


def meeting(*present: int) -> Meeting:
    found = Meeting(3, 2)
    for rank in present:
        found.take(listening(rank))
    return found


def test_addresses_are_in_the_order_of_the_ranks() -> None:
    assert meeting(1, 0).wait_until_all_listen() == (("127.0.0.1", 100), ("127.0.0.1", 101))


def test_a_rank_that_does_not_report_is_named_after_the_time() -> None:
    start = time.monotonic()
    assert meeting(0).wait_for_reports([0, 1], 0.05) == {1}
    assert 0.04 < time.monotonic() - start < 2.0


def test_a_rank_that_has_failed_is_not_waited_for() -> None:
    late = meeting(0)
    late.fail(1, WorkerDiedError("gone", rank=1))
    assert late.wait_for_reports([0, 1], 60.0) == {1}
    with pytest.raises(WorkerDiedError, match="gone"):
        late.wait_until_all_listen()
    late.expect_again(1)
    late.take(listening(1))
    late.wait_until_all_listen()
    assert late.failed == {}


def test_ranks_that_are_not_ready_in_time_are_named() -> None:
    late = meeting(0, 1)
    late.take(Ready(rank=0, epoch=3))
    with pytest.raises(TimeoutError, match="ranks 1 did not"):
        late.wait_until_all_are_ready(time.monotonic() + 0.02)
    late.take(Ready(rank=1, epoch=3))
    late.wait_until_all_are_ready()


def test_an_echo_is_known_as_one() -> None:
    late = meeting(0, 1)
    failure = WorkerFailure(type_name="ConnectionError", message="rank 1 has left", traceback="", is_echo=True)
    late.take(StartUpFailed(rank=0, failure=failure, epoch=3))
    error = late.failed[0]
    assert isinstance(error, RankError) and error.is_echo


def test_close_ends_the_waits() -> None:
    late = meeting(0)
    threading.Timer(0.02, late.close).start()
    with pytest.raises(EngineClosedError):
        late.wait_until_all_listen()
    with pytest.raises(EngineClosedError):
        late.wait_for_reports([1], 60.0)
