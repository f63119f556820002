"""Jobs of several clients in a few threads: turns, shared and cancelled jobs, and the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from inflight.errors import EngineClosedError, OverloadedError
from inflight.multimodal.fair_threads import FairThreads

SOON = 300.0  # seconds that nothing here takes


class Desk:
    """One thread, which is busy until `open` is called. `done` has the jobs in the order in which they ran."""

    def __init__(self, max_size: int = 10) -> None:
        self.threads = FairThreads("test", 1, max_size, "jobs wait")
        self.done: list[str] = []
        self._gate = threading.Event()
        first = self.threads.submit(lambda _: self._gate.wait(SOON), "first", 1.0)
        wait_for(first.running)

    def submit(self, name: str, client: str, seconds: float = 1.0, size: int = 1) -> Future[None]:
        return self.threads.submit(lambda _: self.done.append(name), client, seconds, size)

    def open(self) -> None:
        self._gate.set()


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.open()
    made.threads.close()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_clients_take_turns(desk: Desk) -> None:
    jobs = [desk.submit(f"many {i}", "many") for i in range(5)]
    jobs.append(desk.submit("other", "other"))
    desk.open()
    for each in jobs:
        each.result(SOON)
    assert desk.done.index("other") <= 1


def test_a_shared_job_runs_once_when_its_first_place_is_due(desk: Desk) -> None:
    jobs = [desk.submit(f"many {i}", "many") for i in range(5)]
    desk.threads.share(jobs[4], "other")
    desk.threads.share(jobs[4], "other")
    desk.open()
    for each in jobs:
        each.result(SOON)
    assert desk.done.index("many 4") <= 1 and len(desk.done) == 5
    desk.threads.share(jobs[4], "third")  # it is done
    assert not desk.threads._queue


def test_a_job_fails_only_when_it_has_lost_all_its_places(desk: Desk) -> None:
    large = desk.submit("large", "many", size=5)
    desk.threads.share(large, "other")  # counts for both
    desk.submit("a", "third", size=3)
    assert not large.done()
    desk.submit("b", "fourth", size=3)
    assert isinstance(large.exception(SOON), OverloadedError)
    assert len(desk.threads._waiting) == 2


def test_a_refusal_leaves_the_queue_as_it_is_for_the_client_with_most(desk: Desk) -> None:
    kept = [desk.submit(str(i), "many") for i in range(10)]
    with pytest.raises(OverloadedError) as error:
        desk.submit("more", "many")
    assert error.value.retry_after_seconds >= 1
    assert not any(each.done() for each in kept)
    desk.submit("program", "")  # a program decides itself how much it sends


def test_a_cancelled_job_leaves_at_once(desk: Desk) -> None:
    jobs = [desk.submit(str(i), "many") for i in range(10)]
    desk.threads.share(jobs[3], "other")
    assert jobs[3].cancel()
    jobs[3] = desk.submit("new", "many")
    desk.open()
    for each in jobs:
        each.result(SOON)
    assert "3" not in desk.done and "new" in desk.done


def test_an_error_is_the_job_s_own(desk: Desk) -> None:
    def fail(number: int) -> None:
        raise ValueError(f"in thread {number}")

    failed = desk.threads.submit(fail, "a", 1.0)
    good = desk.submit("good", "a")
    desk.open()
    with pytest.raises(ValueError, match="in thread 0"):
        failed.result(SOON)
    good.result(SOON)


def test_close_fails_what_waits_and_ends_the_threads() -> None:
    ended: list[int] = []
    gate = threading.Event()
    threads = FairThreads("test", 3, 10, "jobs wait", at_end=ended.append)
    running = [threads.submit(lambda number: (gate.wait(SOON), number)[1], "a", 1.0) for _ in range(3)]
    wait_for(lambda: all(each.running() for each in running))
    waiting = threads.submit(lambda _: None, "a", 1.0)
    threads.close()
    threads.close()
    assert isinstance(waiting.exception(SOON), EngineClosedError)
    gate.set()
    assert sorted(each.result(SOON) for each in running) == [0, 1, 2]
    wait_for(lambda: sorted(ended) == [0, 1, 2])
    with pytest.raises(EngineClosedError):
        threads.submit(lambda _: None, "a", 1.0)
