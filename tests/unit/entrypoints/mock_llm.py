"""Arguments for an engine with mock steps, which takes a tenth of a second to start. Its worker has a timeline."""

from __future__ import annotations

from typing import Any

from benchmarks.shared.mock_executor import MockTokensWorker
from inflight.config.engine import EngineConfig
from inflight.executor.multiproc import MultiprocExecutor
from inflight.executor.uniproc import UniProcExecutor
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.timeline import Timeline


class TimedWorker(MockTokensWorker):
    def load_model(self) -> None:
        super().load_model()
        self._timeline = Timeline()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        with self._timeline.span(scheduler_output.step_id, "forward"):
            return super().execute_model(scheduler_output)

    def timeline_events(self) -> Any:
        return self._timeline.events()


class TimedExecutor(UniProcExecutor):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, TimedWorker)


class TimedProcesses(MultiprocExecutor):
    """Its ranks are processes."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, f"{__name__}:TimedWorker")


def mock_arguments(**more: Any) -> dict[str, Any]:
    return {"distributed_executor_backend": f"{__name__}:TimedExecutor", "dtype": "float32", **more}
