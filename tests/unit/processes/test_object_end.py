"""An object's end calls its `close`, in whatever thread it ends; and a forked process is told that it has only a copy."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from inflight.processes.object_end import call_in_forks, close_with, run_to_end, weakly


class Owner:
    def __init__(self, closed: list[str]) -> None:
        self.me: Owner | None = None
        self.keep_open = close_with(self, lambda: closed.append(threading.current_thread().name))
        self.is_copy = False
        call_in_forks(self.disown)

    def disown(self) -> None:
        self.is_copy = True


@pytest.mark.parametrize("in_cycle", [False, True])
def test_the_last_reference_closes_in_another_thread(in_cycle: bool) -> None:
    closed: list[str] = []
    owner = Owner(closed)
    owner.me = owner if in_cycle else None
    assert not closed
    del owner
    gc.collect()
    assert closed == ["inflight-end"], "and `del` has waited for it"


def test_who_closes_by_itself_closes_once() -> None:
    closed: list[str] = []
    owner = Owner(closed)
    owner.keep_open()
    del owner
    assert not closed


def test_a_thread_of_an_engine_does_not_wait() -> None:
    """`close` waits for the threads of the engine, so none of them may wait for `close`."""
    lock, closed = threading.Lock(), threading.Event()

    def close() -> None:
        with lock:
            closed.set()

    class Held:
        def __init__(self) -> None:
            close_with(self, close)

    def drop() -> None:
        held = [Held()]
        with lock:
            held.clear()

    thread = threading.Thread(target=drop, name="inflight-rank-0", daemon=True)
    thread.start()
    thread.join(300)
    assert not thread.is_alive()
    assert closed.wait(300)


def test_a_forked_process_has_a_copy_and_closes_nothing() -> None:
    closed: list[str] = []
    owner, gone = Owner(closed), Owner([])
    del gone
    if (child := os.fork()) == 0:
        try:
            is_copy = owner.is_copy
            del owner
            os._exit(0 if is_copy and not closed else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert not owner.is_copy


@pytest.fixture
def interrupts_are_raised() -> Iterator[None]:
    """A shell that starts the tests in the background lets them ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts_are_raised")
def test_an_interrupt_ends_the_wait_and_not_the_close() -> None:
    begun, may_end, closed = threading.Event(), threading.Event(), threading.Event()

    def close() -> None:
        begun.set()
        may_end.wait(300)
        closed.set()

    def interrupt() -> None:
        begun.wait(300)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_to_end(close)
    assert not closed.is_set()
    may_end.set()
    assert closed.wait(300)


@pytest.mark.parametrize("has_threads", [True, False])
def test_an_error_of_close_is_raised(has_threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def close() -> None:
        raise KeyError("why")

    if not has_threads:
        monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(KeyError, match="why"):
        run_to_end(close)


def test_a_weak_call_keeps_nothing() -> None:
    class Counted:
        def __init__(self, found: list[int]) -> None:
            self.found = found

        def note(self, number: int) -> None:
            self.found.append(number)

    found: list[int] = []
    counted = Counted(found)
    call = weakly(counted.note)
    call(1)
    call(number=2)
    del counted
    call(3)
    assert found == [1, 2]


def test_nothing_is_called_when_the_system_has_no_thread_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    closed: list[str] = []
    owner = Owner(closed)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    del owner
    assert not closed
