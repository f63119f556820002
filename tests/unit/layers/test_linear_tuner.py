"""How a GPU's clock measures calls, played without a GPU. test_gpu_linear.py tests what is made of the measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inflight.layers import linear_tuner
from inflight.layers.linear_tuner import GraphClock


class PlayedClock:
    """Events are times of a list, in milliseconds: what passes between the two of a pair."""

    def __init__(self, passed: list[float]) -> None:
        self.passed, self.log = passed, list[str]()
        self.device = "cuda"

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_args, **_more: self.log.append(name)

    def record_graph(self, work: Callable[[], None]) -> Any:
        self.log.append("record")
        work()
        return self

    def elapsed_time(self, end: object) -> float:
        return self.passed.pop(0)


@contextmanager
def entered(stream: object) -> Iterator[None]:
    yield


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedClock:
    clock = PlayedClock([4.0, 3.0, 2.0, 5.0])
    properties = SimpleNamespace(multi_processor_count=7, L2_cache_size=9)
    event = SimpleNamespace(
        record=lambda: clock.log.append("event"), synchronize=lambda: None, elapsed_time=clock.elapsed_time
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: clock)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: clock)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: clock.log.append("empty_cache"))
    monkeypatch.setattr(linear_tuner, "record_graph", clock.record_graph)
    monkeypatch.setattr(linear_tuner, "drop_library_workspaces", lambda: clock.log.append("drop"))
    return clock


def test_the_fastest_repetition_counts_for_each_call(played: PlayedClock) -> None:
    clock = GraphClock(torch.device("cuda"))
    assert (clock.num_multiprocessors, clock.cache_bytes) == (7, 9)
    calls = [lambda: played.log.append("first"), lambda: played.log.append("second")]
    assert clock.microseconds(calls) == 1000.0
    once = ["first", "second"]
    timed = ["event", "replay", "event"]
    assert played.log == [
        "wait_stream", *once, "synchronize", "record", *once, "replay", *timed * 4, "reset", "drop", "empty_cache"
    ]  # fmt: skip


def test_a_call_that_fails_is_not_recorded(played: PlayedClock) -> None:
    def fail() -> None:
        raise RuntimeError("it does not compile")

    with pytest.raises(RuntimeError, match="it does not compile"):
        GraphClock(torch.device("cuda")).microseconds([fail])
    assert "record" not in played.log
