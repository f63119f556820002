"""`FaultyExecutor`: the ranks are processes with the real model, and rank 1 fails where a test says."""

from __future__ import annotations

from typing import Any

from inflight.config.engine import EngineConfig
from inflight.executor.multiproc import MultiprocExecutor
from inflight.interface.step import SchedulerOutput
from inflight.worker.worker import Worker

UNLUCKY = 13


class FaultyExecutor(MultiprocExecutor):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, f"{__name__}:FaultyWorker")


class FaultyWorker(Worker):
    """On rank 1 a prompt that begins with token `UNLUCKY` fails its step before rank 0 knows of it."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        if self.rank == 1 and UNLUCKY in [int(new.token_ids[0]) for new in scheduler_output.new_requests]:
            raise ValueError("bad luck in /a/secret/path")
        return super().execute_model(scheduler_output)
