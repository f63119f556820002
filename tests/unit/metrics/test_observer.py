"""`Observers`: each observer hears everything, also when another one raises."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.interface.statistics import FaultStatus
from inflight.metrics.observer import EngineObserver
from inflight.metrics.observers import Observers
from tests.unit.metrics.observed import finished, stats

STATUS = FaultStatus(state="healthy")
CALLS: dict[str, tuple[Any, ...]] = {
    "stats_changed": (stats(),),
    "faults_changed": (STATUS,),
    "engine_ended": (3,),
    "first_token": (0.5,),
    "tokens_generated": (2, 0.25),
    "request_finished": (finished("stop"),),
}


class Heard(EngineObserver):
    """Remembers all calls, and raises if it has a `defect`."""

    def __init__(self, defect: str = "") -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._defect = defect

    def __getattribute__(self, name: str) -> Any:
        if name not in CALLS:
            return super().__getattribute__(name)

        def hear(*arguments: Any) -> None:
            self.calls.append((name, arguments))
            if self._defect:
                raise ValueError(self._defect)

        return hear


@pytest.mark.parametrize("name", CALLS)
def test_all_observers_hear_it(name: str) -> None:
    observers = [Heard(), Heard()]
    getattr(Observers(observers), name)(*CALLS[name])
    assert [each.calls for each in observers] == [[(name, CALLS[name])]] * 2
    getattr(EngineObserver(), name)(*CALLS[name])  # does nothing


def test_only_the_first_error_of_each_observer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    observers = [Heard("first defect"), Heard(), Heard("second defect")]
    every = Observers(observers)
    for name, arguments in CALLS.items():
        getattr(every, name)(*arguments)
    assert [each.calls for each in observers] == [list(CALLS.items())] * 3
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "first defect" in caplog.text and "second defect" in caplog.text
