"""`CompileLane`: who waits, who gives its place away, and what fails alone."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest

from inflight.errors import InvalidRequestError, OverloadedError
from inflight.structured_output.backend import CompiledGrammar
from inflight.structured_output.compile_lane import NICENESS, CompileLane
from inflight.thread_priority import lower_priority
from tests.support.waits import wait_until

GRAMMAR = cast("CompiledGrammar", object())


class Gates:
    """Jobs that run until they are let go. `started`: in order."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self._gates: dict[str, threading.Event] = {}
        self._has_started: dict[str, threading.Event] = {}

    def job(self, name: str) -> Callable[[], CompiledGrammar]:
        gate = self._gates[name] = threading.Event()
        has_started = self._has_started[name] = threading.Event()

        def run() -> CompiledGrammar:
            self.started.append(name)
            has_started.set()
            assert gate.wait(timeout=300)
            return GRAMMAR

        return run

    def wait_for(self, name: str) -> None:
        assert self._has_started[name].wait(timeout=300), f"{name} has not started; these have: {self.started}"

    def open(self, *names: str) -> None:
        for name in names or self._gates:
            self._gates[name].set()


def lane(num_running: int = 1, max_queued: int = 100, max_seconds: float = 60.0) -> CompileLane:
    return CompileLane("test-lane", num_running=num_running, max_queued=max_queued, max_seconds=max_seconds)


def submit(a_lane: CompileLane, gates: Gates, names: str) -> dict[str, Future[CompiledGrammar]]:
    return {name: a_lane.submit(gates.job(name)) for name in names}


def test_so_many_run_in_order() -> None:
    gates, two = Gates(), lane(2)
    jobs = submit(two, gates, "abcd")
    gates.wait_for("a")
    gates.wait_for("b")
    assert sorted(gates.started) == ["a", "b"]
    gates.open("b")
    gates.wait_for("c")
    assert "d" not in gates.started
    gates.open()
    assert all(job.result(timeout=300) is GRAMMAR for job in jobs.values())
    two.close()


def test_nobody_waits_for_what_nobody_wants() -> None:
    gates, one = Gates(), lane(1)
    jobs = submit(one, gates, "abcd")
    gates.wait_for("a")
    one.leave(jobs["b"])
    assert jobs["b"].cancelled()
    one.leave(jobs["a"])  # it runs on, and its place is free
    gates.wait_for("c")
    assert one._written_off == {jobs["a"]}
    one.leave(jobs["c"])  # one is written off already: this one keeps its place
    assert one._running == {jobs["c"]}
    gates.open("a")
    assert jobs["a"].result(timeout=300) is GRAMMAR, "who asks for it again gets it"
    assert "d" not in gates.started
    gates.open()
    assert jobs["d"].result(timeout=300) is GRAMMAR
    assert "b" not in gates.started
    one.leave(jobs["d"])
    one.close()


def test_a_job_that_takes_too_long_fails_and_gives_its_place_away() -> None:
    gates, one = Gates(), lane(1, max_seconds=0.05)
    jobs = submit(one, gates, "ab")
    with pytest.raises(InvalidRequestError, match=r"not compiled within 0\.05 s"):
        jobs["a"].result(timeout=300)
    gates.wait_for("b")
    gates.open()
    one.close()
    assert isinstance(jobs["a"].exception(), InvalidRequestError), "its late end changes nothing"
    assert not one._written_off, "a compilation that has ended takes nobody's place"


def test_the_queue_is_bounded() -> None:
    gates, one = Gates(), lane(1, max_queued=2)
    jobs = submit(one, gates, "abc")
    with pytest.raises(OverloadedError, match="too many grammars wait"):
        submit(one, gates, "d")
    one.leave(jobs["b"])
    jobs |= submit(one, gates, "e")
    gates.open()
    assert jobs["e"].result(timeout=300) is GRAMMAR
    one.close()


def test_a_full_queue_refuses_the_newest_of_the_client_that_has_most() -> None:
    gates, one = Gates(), lane(1, max_queued=2)
    forgotten: list[str] = []
    jobs = {
        name: one.submit(gates.job(name), "many", forget=lambda name=name: forgotten.append(name))  # type: ignore[misc]
        for name in "abc"
    }
    gates.wait_for("a")
    small = one.submit(gates.job("d"), "other")
    assert isinstance(jobs["c"].exception(timeout=0), OverloadedError)
    assert forgotten == ["c"]
    with pytest.raises(OverloadedError):
        one.submit(gates.job("e"), "many")
    one.leave(jobs["c"])  # as whoever waited for it does; it changes nothing
    gates.open()
    assert small.result(timeout=300) is GRAMMAR
    assert jobs["b"].result(timeout=300) is GRAMMAR
    assert gates.started == ["a", "d", "b"], "the small one of the other client was next"
    one.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_compilations_have_a_lower_priority_than_the_engine() -> None:
    def niceness() -> Any:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def check() -> None:
        lower_priority(3)  # as in a server that was started with nice(1)
        one, before = lane(1), niceness()
        assert one.submit(niceness).result(timeout=300) == before + NICENESS
        assert niceness() == before
        one.close()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(check).result(timeout=300)


def test_whatever_a_library_raises_is_its_own_jobs() -> None:
    class PanicError(BaseException):
        """As a library in Rust raises it."""

    def panics() -> Any:
        raise PanicError("assertion failed")

    gates, one = Gates(), lane(1)
    bad, good = one.submit(panics), one.submit(gates.job("good"))
    gates.open()
    assert isinstance(bad.exception(timeout=300), PanicError)
    assert good.result(timeout=300) is GRAMMAR
    one.close()


def test_a_close_cancels_what_waits() -> None:
    gates, one = Gates(), lane(1)
    jobs = submit(one, gates, "ab")
    opener = threading.Thread(target=lambda: (wait_until(jobs["b"].cancelled), gates.open()))
    opener.start()
    one.close()
    opener.join()
    assert jobs["a"].result(timeout=0) is GRAMMAR
    assert jobs["b"].cancelled()
    assert one.submit(gates.job("c")).cancelled()


def test_when_a_compilation_needs_too_long_the_next_one_starts_although_it_still_runs() -> None:
    gate = threading.Event()
    grammar = cast("CompiledGrammar", object())

    def compile_slowly() -> CompiledGrammar:
        assert gate.wait(300)
        return grammar

    lane = CompileLane("lane", num_running=1, max_queued=4, max_seconds=0.05)
    slow = lane.submit(compile_slowly)
    lane._max_seconds = 60.0  # the next one may take as long as it likes
    following = lane.submit(lambda: grammar)
    with pytest.raises(InvalidRequestError, match="was not compiled within"):
        slow.result(300)
    assert following.result(300) is grammar
    gate.set()
    lane.close()


def test_the_timer_of_a_compilation_ends_with_it_and_keeps_no_process_alive() -> None:
    def timers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)}

    before = timers()
    gates, one = Gates(), lane(1, max_seconds=100_000.0)
    jobs = submit(one, gates, "a")
    gates.wait_for("a")
    own = timers() - before
    assert own and all(timer.daemon for timer in own)
    gates.open()
    assert jobs["a"].result(timeout=300) is GRAMMAR
    one.close()
    wait_until(lambda: timers() <= before)
