"""LoadingThreads: one thread reads the weights while other programs use the cores."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from inflight.model_loader import loader
from inflight.model_loader.loading_threads import WINDOW_SECONDS, LoadingThreads, threads_waited
from tests.unit.model_loader.test_peak_bytes import HEAD, PLAIN, load, written


class Clock:
    now = 100.0
    waited = 7.0


@pytest.fixture
def clock() -> Iterator[Clock]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield Clock()
    torch.set_num_threads(before)


def threads_of(clock: Clock) -> LoadingThreads:
    return LoadingThreads(lambda: clock.waited, lambda: clock.now)


def test_one_thread_while_other_programs_compute(clock: Clock) -> None:
    threads = threads_of(clock)
    with threads.watched():
        for seconds, waited, expected in (
            (0.5 * WINDOW_SECONDS, 10.0, 3),  # too short to judge
            (0.6 * WINDOW_SECONDS, 10.0, 1),
            (100.0, 0.0, 1),  # it stays so until the model is loaded
        ):
            clock.now += seconds
            clock.waited += waited
            threads.look()
            assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == 3


def test_all_threads_on_a_quiet_machine(clock: Clock) -> None:
    threads = threads_of(clock)
    with threads.watched():
        for _ in range(5):
            clock.now += 1.0
            clock.waited += 0.2
            threads.look()
            assert torch.get_num_threads() == 3


def test_the_threads_come_back_after_an_error(clock: Clock) -> None:
    threads = threads_of(clock)

    def fail() -> None:
        with threads.watched():
            clock.now, clock.waited = clock.now + 1, clock.waited + 1
            threads.look()
            assert torch.get_num_threads() == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.get_num_threads() == 3


def test_each_part_of_a_model_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    def waited() -> float:
        clock.now += 1.0
        clock.waited += 1.0
        return clock.waited

    found: list[int] = []

    class Noted(LoadingThreads):
        def __init__(self) -> None:
            super().__init__(waited, lambda: clock.now)

        def look(self) -> None:
            super().look()
            found.append(torch.get_num_threads())

    monkeypatch.setattr(loader, "LoadingThreads", Noted)
    load(written(HEAD)(tmp_path), PLAIN)
    assert len(found) > 2 and found[-1] == 1
    assert torch.get_num_threads() == 3


def test_what_all_threads_waited() -> None:
    """A thread that ends is counted no more, so the sum may fall; it is never negative."""
    before = threads_waited()
    end = time.monotonic() + 0.05
    others = [
        threading.Thread(target=lambda: [None for _ in iter(lambda: time.monotonic() < end, False)]) for _ in range(4)
    ]
    for other in others:
        other.start()
    assert threads_waited() >= 0.0 and before >= 0.0
    for other in others:
        other.join()
