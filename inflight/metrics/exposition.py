"""`Exposition`: the instruments as prometheus_client's metrics, exposed under their own names and their aliases.

If there are several front ends, PROMETHEUS_MULTIPROC_DIR names a folder with files for the values of each of them
(entrypoints/serve/metric_files.py). Every front end exposes the sums over all front ends, and for a gauge the value that was
set last. prometheus_client reads the variable when it is imported, so the process that starts the front ends sets the variable.
"""

import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from prometheus_client import Counter, Gauge, Histogram, Metric, values
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from inflight.metrics.instruments import OF_ENGINE, Instrument

MODEL_LABEL = "model_name"
ENGINE_LABEL = "engine"


def use_files_of(index: int) -> None:
    """Let this process keep its values in the files of front end `index`, and not in files that are named after its process id.
    Call it before an `Exposition` is made."""
    values.ValueClass = values.MultiProcessValue(lambda: index)  # type: ignore[no-untyped-call]


class CountingHistogram(Histogram):
    """A histogram that has `observe_many` in addition to `observe`. `observe_many` counts in plain Python, so it is cheap
    enough to be called for every token. `flush` adds these counts to the histogram."""

    def _metric_init(self) -> None:  # called for the metric of each set of label values
        super()._metric_init()
        self._pending: dict[int, int] = {}  # index of a bucket -> observations
        self._pending_total = 0.0

    def observe_many(self, value: float, count: int) -> None:
        index = bisect_left(self._upper_bounds, value)
        self._pending[index] = self._pending.get(index, 0) + count
        self._pending_total += value * count

    def flush(self) -> None:
        self._sum.inc(self._pending_total)
        for index, count in self._pending.items():
            self._buckets[index].inc(count)
        self._pending = {}
        self._pending_total = 0.0


class Exposition(Collector):
    """Owns the metrics of `instruments`. They are in no global registry, so that a process may have several expositions."""

    def __init__(self, instruments: Iterable[Instrument], model_name: str, engines: range | None = None) -> None:
        """With `engines`, the metrics of `OF_ENGINE` have the number of the engine as their second label."""
        self._model_name = model_name
        self._names_engines = engines is not None
        if engines is not None:
            instruments = [
                replace(each, labels=(ENGINE_LABEL, *each.labels)) if each.name in OF_ENGINE else each
                for each in instruments
            ]
        self._instruments = {instrument.full_name: instrument for instrument in instruments}
        self._metrics = {instrument.name: _create(instrument) for instrument in self._instruments.values()}
        for instrument in self._instruments.values():
            if not instrument.labels:  # expose 0 from the start, so that a rate counts the first increase, too
                self.get(instrument.name)
            elif instrument.labels == (ENGINE_LABEL,):
                for engine in engines or ():
                    self.get(instrument.name, engine=engine)
        folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        self._multiprocess = MultiProcessCollector(None, folder) if folder else None  # type: ignore[no-untyped-call]

    def get(self, name: str, *labels: str, engine: int = 0) -> Any:  # Any: a Counter, Gauge or CountingHistogram
        """Returns the metric `name` for these label values. This method adds the values of `model_name` and `engine`."""
        if self._names_engines and name in OF_ENGINE:
            labels = (str(engine), *labels)
        return self._metrics[name].labels(self._model_name, *labels)

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics, each followed by its aliases."""
        for family in self._families():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
            for alias in self._instruments[family.name].aliases:
                same = Metric(alias, family.documentation, family.type)
                same.samples = [
                    sample._replace(name=alias + sample.name.removeprefix(family.name)) for sample in family.samples
                ]
                yield same

    def render(self, accept: str) -> tuple[bytes, str]:
        """Returns the body and the content type of the answer to a scrape that has this `Accept` header. If prometheus_client
        cannot read the header, the answer is in the plain text format."""
        try:
            encode, content_type = choose_encoder(accept.replace('"', ""))  # it knows no quoted parameters
        except Exception:  # a parameter of any client, such as version=1.x
            encode, content_type = choose_encoder("")
        return encode(self), content_type

    def _families(self) -> Iterable[Metric]:
        if self._multiprocess is None:
            return (family for metric in self._metrics.values() for family in metric.collect())
        merged: Iterable[Metric] = self._multiprocess.collect()  # type: ignore[no-untyped-call]
        by_name = {family.name: family for family in merged}
        return [by_name[name] for name in self._instruments if name in by_name]  # as ordered in `instruments`


def _create(instrument: Instrument) -> Counter | Gauge | CountingHistogram:
    labels = (MODEL_LABEL, *instrument.labels)
    if instrument.kind == "counter":
        return Counter(instrument.full_name, instrument.help, labels, registry=None)
    if instrument.kind == "gauge":  # only one front end sets it, so the newest value is right
        return Gauge(instrument.full_name, instrument.help, labels, registry=None, multiprocess_mode="mostrecent")
    return CountingHistogram(instrument.full_name, instrument.help, labels, registry=None, buckets=instrument.buckets)
