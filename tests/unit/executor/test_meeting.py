"""The two waves of a meeting, and what ends its waits."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

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
    assert 0.04 < time.monotonic() - start < 60


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


def test_the_first_error_of_a_rank_is_kept() -> None:
    found = meeting(0, 1)
    found.fail(1, WorkerDiedError("first", rank=1))
    found.fail(1, WorkerDiedError("second", rank=1))
    with pytest.raises(WorkerDiedError, match="first"):
        found.wait_until_all_are_ready()
    found.close(WorkerDiedError("the meeting has failed", rank=0))
    found.close()
    with pytest.raises(WorkerDiedError, match="the meeting has failed"):
        found.wait_until_all_are_ready()


def test_a_new_process_must_say_everything_again() -> None:
    found = meeting(0, 1)
    for rank in range(2):
        found.take(Ready(rank=rank, epoch=3))
    found.expect_again(1)
    past = time.monotonic()
    with pytest.raises(TimeoutError, match="ranks 1 did not say where they listen"):
        found.wait_until_all_listen(past)
    with pytest.raises(TimeoutError, match="ranks 1 did not meet"):
        found.wait_until_all_are_ready(past)


def test_a_rank_that_listens_and_then_fails_has_not_reported() -> None:
    found = meeting(0, 1)
    found.fail(1, WorkerDiedError("gone", rank=1))
    assert found.wait_for_reports([0, 1], 60.0) == {1}
    assert found.wait_for_reports([0], 60.0) == set()


@pytest.mark.parametrize(
    ("present", "end"),
    [
        ((0,), lambda found: found.take(listening(1))),
        ((0, 1), lambda found: found.take(Ready(rank=1, epoch=3))),
        ((0,), lambda found: found.fail(1, WorkerDiedError("gone", rank=1))),
        ((0,), lambda found: found.close()),
    ],
)
def test_news_end_a_wait_without_a_deadline(present: tuple[int, ...], end: Callable[[Meeting], None]) -> None:
    found = meeting(*present)
    found.take(Ready(rank=0, epoch=3))
    waits = found.wait_until_all_are_ready if len(present) == 2 else found.wait_until_all_listen
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        with contextlib.suppress(EngineClosedError, WorkerDiedError):
            waits()

    waiter = threading.Thread(target=wait, daemon=True)
    with found._changed:  # the news come when the other thread waits
        waiter.start()
        begun.wait(300)
    while not found._changed._waiters:  # type: ignore[attr-defined]
        assert waiter.is_alive()
    end(found)
    waiter.join(300)
    assert not waiter.is_alive()


def test_failed_ranks_need_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    found = meeting(0, 1)
    found.take(Ready(rank=0, epoch=3))
    found.fail(1, WorkerDiedError("gone", rank=1))
    is_over: list[bool] = []
    monkeypatch.setattr(found._changed, "wait_for", lambda holds, seconds: is_over.append(holds()))
    found.wait_for_all_replies(60.0)
    found.expect_again(1)
    found.wait_for_all_replies(60.0)
    assert is_over == [True, False]
