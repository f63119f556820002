"""Executors that fail where a test says, and what is none."""

from __future__ import annotations

import os
import threading

from benchmarks.shared.mock_executor import MockExecutor, MockTokensWorker
from inflight.config.engine import EngineConfig
from inflight.errors import OutOfMemoryError
from inflight.executor.uniproc import UniProcExecutor
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput

NO_EXECUTOR = 7


class FailingWorker(MockTokensWorker):
    """A prompt that begins with token 13 fails its step; with 14, the rank; with 15, its step and all that follow; with
    16, the process; with 17, the process in its first decode."""

    is_broken = False
    decodes_badly: frozenset[str] = frozenset()

    def check_health(self) -> None:
        if self.is_broken:
            raise RuntimeError("no device")

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        first = [int(new.token_ids[0]) for new in scheduler_output.new_requests]
        if 13 in first:
            raise ValueError("thirteen")
        if 14 in first:
            raise SystemExit("fourteen")
        if 15 in first:
            self.is_broken = True
            raise ValueError("fifteen")
        if 16 in first:
            os._exit(16)  # as if a library crashed
        if self.decodes_badly & {*scheduler_output.request_ids} - {
            new.request_id for new in scheduler_output.new_requests
        }:
            os._exit(17)
        self.decodes_badly |= {new.request_id for new in scheduler_output.new_requests if new.token_ids[0] == 17}
        return super().execute_model(scheduler_output)


class FailingExecutor(UniProcExecutor):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, FailingWorker)


class DyingExecutor(MockExecutor):
    """Its rank dies while there are no requests."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        threading.Timer(0.5, self._rank_died, (0, "old age")).start()


class TooLarge(MockExecutor):
    def __init__(self, config: EngineConfig) -> None:
        raise OutOfMemoryError("it does not fit")


class Defective(MockExecutor):
    def __init__(self, config: EngineConfig) -> None:
        raise ZeroDivisionError("a defect")


class Vanishing(MockExecutor):
    def __init__(self, config: EngineConfig) -> None:
        os._exit(9)
