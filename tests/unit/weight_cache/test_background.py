"""Work beside serving: when it begins, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from inflight.weight_cache import background
from inflight.weight_cache.background import BackgroundWork


def test_it_begins_when_a_request_was_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_IDLE_SECONDS", 1e9)
    served = threading.Event()
    done = threading.Event()
    work = BackgroundWork()
    work.add(lambda _: done.set(), is_for_later_starts=True)
    work.start(served.is_set)
    assert not done.wait(0.3)
    served.set()
    assert done.wait(60)
    work.close(60)


def test_it_begins_if_nobody_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_IDLE_SECONDS", 0.0)
    done = threading.Event()
    work = BackgroundWork()
    work.add(lambda _: done.set(), is_for_later_starts=True)
    work.start(lambda: False)
    assert done.wait(60)
    work.close(60)


def test_a_task_that_fails_is_told_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    def fails(_: object) -> None:
        raise ValueError("x")

    done = threading.Event()
    work = BackgroundWork()
    work.add(fails, is_for_later_starts=True)
    work.add(lambda _: done.set(), is_for_later_starts=True)
    work.start(lambda: True)
    work.close(60)
    assert done.is_set()
    assert "work beside serving has failed" in caplog.text


def test_the_end_waits_only_so_long() -> None:
    begun = threading.Event()
    stopped = threading.Event()

    def works(is_stopped: Callable[[], bool]) -> None:
        begun.set()
        while not is_stopped():
            pass
        stopped.set()

    work = BackgroundWork()
    work.add(works, is_for_later_starts=True)
    work.start(lambda: True)
    assert begun.wait(60)
    work.close(0.01)
    assert stopped.is_set()


def test_what_is_for_this_engine_alone_ends_with_it() -> None:
    begun = threading.Event()

    def works(is_stopped: Callable[[], bool]) -> None:
        begun.set()
        while not is_stopped():
            pass

    work = BackgroundWork()
    work.add(works, is_for_later_starts=False)
    work.start(lambda: True)
    assert begun.wait(60)
    work.close(1e9)


def test_an_engine_that_served_nobody_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_IDLE_SECONDS", 1e9)
    done = threading.Event()
    work = BackgroundWork()
    work.add(lambda _: done.set(), is_for_later_starts=True)
    work.start(lambda: False)
    work.close(60)
    assert not done.is_set()
    BackgroundWork().close(0)
