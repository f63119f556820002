"""The executors under test. A new one is a line in `EXECUTORS`; the tests stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from inflight.config.engine import EngineConfig
from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.envs import LaunchedRank
from inflight.executor.executor import Executor
from inflight.executor.external_launcher import ExternalLauncherExecutor
from inflight.executor.multiproc import MultiprocExecutor
from inflight.executor.ray_executor import RayExecutor
from inflight.executor.uniproc import UniProcExecutor
from tests.conformance.configs import engine_config
from tests.conformance.scripted_worker import ScriptedWorker


@dataclass
class ExecutorFactory:
    """Makes executors of scripted workers, and shuts them down after the test.

    `make_executor(budget=0.1)` is an executor whose steps may take 100 ms.
    """

    backend: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    construct: Callable[[EngineConfig], Executor]
    made: list[Executor] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def last_rank(self) -> int:
        return self.world_size - 1

    def __call__(
        self,
        *,
        budget: float = 10.0,
        name: str = "scripted",
        fault_tolerance: FaultToleranceConfig = FaultToleranceConfig(),  # noqa: B008  # it is frozen
    ) -> Executor:
        config = engine_config(
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            backend=self.backend,
            budget=budget,
            name=name,
        )
        executor = self.construct(replace(config, fault_tolerance=fault_tolerance))
        self.made.append(executor)
        return executor


def uniproc(config: EngineConfig) -> Executor:
    return UniProcExecutor(config, ScriptedWorker)


def multiproc(config: EngineConfig) -> Executor:
    return MultiprocExecutor(config, "tests.conformance.scripted_worker:ScriptedWorker")


def ray(config: EngineConfig) -> Executor:
    return RayExecutor(config, "tests.conformance.scripted_worker:ScriptedWorker")


def external_launcher(config: EngineConfig) -> Executor:
    # other ranks are in its own tests
    me = LaunchedRank(0, 1, "127.0.0.1", 29500, "0", agent_serves_store=True, local_ranks=range(1))
    return ExternalLauncherExecutor(config, ScriptedWorker, me)


# name -> backend, TP size, PP size, how one is constructed with scripted workers
EXECUTORS: dict[str, tuple[str, int, int, Callable[[EngineConfig], Executor]]] = {
    "uniproc": ("uni", 1, 1, uniproc),
    "uniproc-pp2-tp2": ("uni", 2, 2, uniproc),
    "multiproc": ("mp", 1, 1, multiproc),
    "external-launcher": ("external_launcher", 1, 1, external_launcher),
    "multiproc-tp2": ("mp", 2, 1, multiproc),
    "ray-tp2": ("ray", 2, 1, ray),
}


# Most of the time of these tests is the start of processes, and two ranks do all that one rank does. A start with Ray takes 3
# seconds. So tests/e2e/test_ray.py runs some of these tests with Ray, also without the mark.
MARKS = {"multiproc": pytest.mark.full, "ray-tp2": pytest.mark.full}


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in EXECUTORS])
def executor_factory(request: pytest.FixtureRequest) -> Iterator[ExecutorFactory]:
    factory = ExecutorFactory(*EXECUTORS[request.param])
    if factory.backend == "ray":
        request.getfixturevalue("ray_cluster")
    yield factory
    for executor in factory.made:
        executor.shutdown()
