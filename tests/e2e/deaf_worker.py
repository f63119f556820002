"""`DeafWorker`: a real worker that loses its link in a step, and then cannot be reached for some epochs."""

from __future__ import annotations

import socket
from concurrent.futures import Future

from inflight.config.engine import EngineConfig
from inflight.executor.multiproc import MultiprocExecutor
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.worker.worker import Worker
from tests.support.deaf import deafen

STEPS_BEFORE_CUT = 5


class DeafWorker(Worker):
    _num_steps = -1  # before the cut; negative: no cut

    def cut(self, rank: int, num_epochs: int) -> None:
        if rank == self.rank:
            self._num_steps = STEPS_BEFORE_CUT
            deafen(num_epochs)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        if self._num_steps == 0:
            self._pipeline.link._before._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        self._num_steps -= 1
        return super().execute_model(scheduler_output)


class DeafExecutor(MultiprocExecutor):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, "tests.e2e.deaf_worker:DeafWorker")
