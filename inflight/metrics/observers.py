"""`Observers`: several observers of an engine, as one."""

import logging
from collections.abc import Callable, Sequence

from inflight.interface.statistics import FaultStatus, SchedulerStats
from inflight.metrics.observer import EngineObserver, FinishedRequest

logger = logging.getLogger(__name__)


class Observers(EngineObserver):
    """Calls several observers. If an observer raises, requests go on. Only the first error of each observer is logged."""

    def __init__(self, observers: Sequence[EngineObserver]) -> None:
        self._observers = observers
        self._failed: set[int] = set()  # indices

    def stats_changed(self, stats: SchedulerStats) -> None:
        self._tell(lambda observer: observer.stats_changed(stats))

    def faults_changed(self, status: FaultStatus) -> None:
        self._tell(lambda observer: observer.faults_changed(status))

    def engine_ended(self, engine: int) -> None:
        self._tell(lambda observer: observer.engine_ended(engine))

    def first_token(self, seconds: float) -> None:
        self._tell(lambda observer: observer.first_token(seconds))

    def tokens_generated(self, count: int, seconds: float | None) -> None:
        self._tell(lambda observer: observer.tokens_generated(count, seconds))

    def request_finished(self, request: FinishedRequest) -> None:
        self._tell(lambda observer: observer.request_finished(request))

    def _tell(self, call: Callable[[EngineObserver], None]) -> None:
        for i, observer in enumerate(self._observers):
            try:
                call(observer)
            except Exception:
                if i not in self._failed:
                    self._failed.add(i)
                    logger.exception(
                        "%s raised; further errors of this observer are not logged", type(observer).__name__
                    )
