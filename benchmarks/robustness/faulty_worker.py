"""Workers that fail on order, for `benchmarks.faults`.

The server gets them by `--distributed-executor-backend benchmarks.robustness.faulty_worker:FaultyExecutor`. The environment
variable FAULT_ORDERS names a folder. When the file `rank<N>` appears in it, rank N takes the file away at its next step, and
does what the file says:

    raise           the forward pass raises an exception
    memory          the forward pass asks torch for more memory than any machine has
    damaged-frame   the process writes bytes that are not a frame into its stream to the executor
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from inflight.config.engine import EngineConfig
from inflight.executor.multiproc import MultiprocExecutor
from inflight.interface.step import SchedulerOutput
from inflight.worker.worker import Worker

ORDERS_VARIABLE = "FAULT_ORDERS"
ORDERS = ("raise", "memory", "damaged-frame")
_TOO_MANY_BYTES = 1 << 60


class FaultyExecutor(MultiprocExecutor):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, f"{__name__}:FaultyWorker")


class FaultyWorker(Worker):
    """A worker that looks for its order at the beginning of each step."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:  # Any: the future of `Worker`
        if order := take_order(self.rank):
            if order == "damaged-frame":
                with socket.socket(fileno=os.dup(int(sys.argv[2]))) as stream:
                    stream.sendall(b"GET / HTTP/1.1\r\n\r\n")
            else:
                self._fail_in_next_forward(order)
        return super().execute_model(scheduler_output)

    def _fail_in_next_forward(self, order: str) -> None:
        runner = self.runner
        execute_model = runner.execute_model

        def fail(*args: Any) -> Any:  # Any: those of the runner
            runner.execute_model = execute_model  # type: ignore[method-assign]
            if order == "memory":
                torch.empty(_TOO_MANY_BYTES, dtype=torch.uint8)
            raise RuntimeError("this step was ordered to fail")

        runner.execute_model = fail  # type: ignore[method-assign,assignment]


def give_order(folder: Path, rank: int, order: str) -> None:
    """Tell a rank to fail. The file appears at once with its whole text."""
    assert order in ORDERS, order
    unseen = folder / f"order{rank}"
    unseen.write_text(order)
    unseen.rename(folder / f"rank{rank}")


def take_order(rank: int) -> str:
    """Returns this rank's order, or "" if there is none. An order is taken once."""
    path = Path(os.environ[ORDERS_VARIABLE]) / f"rank{rank}"
    try:
        order = path.read_text()
    except FileNotFoundError:
        return ""
    path.unlink()
    return order
