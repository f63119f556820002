"""What `start` makes of the settings: names, observers, limits, the engine and the app."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.engine.serving.admission import QueueLimits
from inflight.entrypoints.serve import engine_start
from inflight.entrypoints.serve.engine_start import ServedModel, start
from inflight.entrypoints.serve.server import StartUpClock
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.errors import ConfigError, EngineError
from inflight.metrics.log_lines import RequestLog, StatsLog
from inflight.metrics.serving import ServingMetrics
from tests.unit.metrics.observed import stats


class Started:
    """In place of `AsyncLLM`, `RequestTracing` and the app: remembers how they were made."""

    def __init__(self, num_replicas: int = 1) -> None:
        self.model = SimpleNamespace(block_size=16, max_model_len=4096, num_kv_cache_tokens=1999)
        self.num_kv_cache_tokens = [1999 + 1600 * number for number in range(num_replicas)]
        self.attached: list[tuple[Any, ...]] = []
        self.made: list[EngineArgs] = []
        self.options: dict[str, Any] = {}
        self.built: dict[str, Any] = {}
        self.traces: list[tuple[str, str]] = []
        self.num_closed = 0
        self.collections: list[str] = []
        self.defect: Exception | None = None

    async def attach(self, args: EngineArgs, *sockets: Any, **options: Any) -> Started:
        self.attached.append((args, *sockets))
        self.options = options
        return self

    async def from_args(self, args: EngineArgs, **options: Any) -> Started:
        self.made.append(args)
        self.options = options
        return self

    async def close(self) -> None:
        self.num_closed += 1

    def tracing(self, name: str, endpoint: str) -> Any:
        self.traces.append((name, endpoint))
        return SimpleNamespace(name=name)

    def build_app(self, engine: Any, settings: ServerSettings, **options: Any) -> Any:
        assert engine is self
        if self.defect is not None:
            raise self.defect
        self.built = {"settings": settings, **options}
        return "the app"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    started = Started()
    monkeypatch.setattr(engine_start, "AsyncLLM", started)
    monkeypatch.setattr(engine_start, "RequestTracing", started.tracing)
    monkeypatch.setattr(importlib, "import_module", lambda name: started)
    # a full collection takes long in the process of the tests, and what is frozen there must stay so
    monkeypatch.setattr(gc, "collect", lambda: started.collections.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: started.collections.append("freeze"))
    return started


def begin(settings: ServerSettings, args: EngineArgs, **options: Any) -> ServedModel:
    return asyncio.run(start(settings, args, StartUpClock(), **options))


def test_an_engine_of_this_process(started: Started) -> None:
    clock = StartUpClock()
    settings, args = ServerSettings(max_queued_requests=7, max_queued_tokens=None), EngineArgs(model="org/m")
    model = asyncio.run(start(settings, args, clock))
    assert started.made == [args] and not started.attached
    assert started.options["limits"] == QueueLimits(max_queued_requests=7, max_call_sequences=1024)
    metrics, log = started.options["observers"]
    assert isinstance(metrics, ServingMetrics) and isinstance(log, StatsLog)
    assert started.built == {"settings": settings, "metrics": metrics, "request_log": None}
    assert model == ServedModel("org/m", started, "the app", metrics, None)  # type: ignore[arg-type]
    assert model.description == "org/m, max_model_len 4096, 1999 KV tokens"
    scraped = metrics.render("")[0].decode()
    assert 'cache_config_info{block_size="16",model_name="org/m",num_gpu_blocks="124"} 1.0' in scraped
    assert [phase.split()[0] for phase in clock.summary().split(": ")[1].split(", ")] == ["engine", "app"]
    assert started.collections == ["collect", "freeze"]


def test_an_engine_of_another_process(started: Started) -> None:
    args: Any = EngineArgs(model="org/m", data_parallel_size=2)
    started.num_kv_cache_tokens *= 2
    begin(ServerSettings(max_queued_tokens=5), args, engine_sockets=("first", "second"))
    assert started.attached == [(args, "first", "second")] and not started.made
    assert started.options["limits"] == QueueLimits(
        max_queued_requests=1024, max_queued_tokens=5, max_call_sequences=1024
    )
    assert [type(each) for each in started.options["observers"]] == [ServingMetrics, StatsLog, StatsLog]


def test_each_replica_has_its_own_line_and_metrics(started: Started, caplog: pytest.LogCaptureFixture) -> None:
    started.num_kv_cache_tokens = [1600, 3200]
    model = begin(ServerSettings(log_stats_interval=0.001), EngineArgs(data_parallel_size=2))
    scraped = model.metrics.render("")[0].decode()
    for engine, blocks in ((0, 100), (1, 200)):
        assert f'block_size="16",engine="{engine}",model_name="embedded",num_gpu_blocks="{blocks}"' in scraped

    async def report() -> None:
        for observer in started.options["observers"]:
            observer.stats_changed(dataclasses.replace(stats(), engine=1))
            observer.stats_changed(dataclasses.replace(stats(), engine=1, num_running=0, num_waiting=0))
        while "the engine is idle now" not in caplog.text:
            await asyncio.sleep(0.001)

    caplog.set_level("INFO", "inflight")
    asyncio.run(report())
    assert [record.getMessage()[:9] for record in caplog.records] == ["engine 1:"]


@pytest.mark.parametrize(
    ("settings", "args", "name"),
    [
        (ServerSettings(served_model_names=("a", "b")), EngineArgs(model="org/m"), "a"),
        (ServerSettings(), EngineArgs(model="org/m"), "org/m"),
        (ServerSettings(), EngineArgs(), "embedded"),
    ],
)
def test_the_first_name_is_that_of_metrics_and_traces(
    started: Started, settings: ServerSettings, args: EngineArgs, name: str
) -> None:
    settings = dataclasses.replace(settings, otlp_traces_endpoint="http://localhost:4318")
    model = begin(settings, args)
    assert model.name == name and started.traces == [(name, "http://localhost:4318")]
    assert f'model_name="{name}"' in model.metrics.render("")[0].decode()
    assert started.options["observers"][-1] is model.tracing


@pytest.mark.parametrize(
    ("settings", "records_engine", "observers"),
    [
        (ServerSettings(), False, [ServingMetrics]),
        (ServerSettings(log_stats_interval=0), True, [ServingMetrics]),
        (ServerSettings(log_requests=True), True, [ServingMetrics, RequestLog, StatsLog]),
        (ServerSettings(log_requests=True), False, [ServingMetrics, RequestLog]),
    ],
)
def test_who_observes_the_engine(
    started: Started, settings: ServerSettings, records_engine: bool, observers: list[type]
) -> None:
    """One front end logs the engine's statistics, each logs its own requests."""
    model = begin(settings, EngineArgs(), records_engine=records_engine)
    found = started.options["observers"]
    assert [type(each) for each in found] == observers
    assert started.built["request_log"] is (found[1] if settings.log_requests else None)
    up = 'inflight:engine_up{model_name="embedded"} 1.0'
    assert (up in model.metrics.render("")[0].decode()) is records_engine
    assert model.tracing is None


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_an_error_before_the_engine_starts(started: Started, option: str) -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        begin(ServerSettings(**{option: "nonsense"}), EngineArgs())  # type: ignore[arg-type]
    assert not started.made


def test_an_app_that_cannot_be_built_leaves_no_engine(started: Started) -> None:
    started.defect = EngineError("no")
    with pytest.raises(EngineError, match="no"):
        begin(ServerSettings(), EngineArgs())
    assert started.num_closed == 1
