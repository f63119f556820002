"""A device whose forward pass takes a fixed time and no processor: the real worker, runner and sampler with another model.

The logits of a token's successor are a row of a fixed random table, so what is drawn depends on what was drawn before. They are
copied within the time of the forward; if that takes longer (a row of 151,936 is 0.6 MB), so does the forward.
"""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor

from benchmarks.shared.precise_sleep import PreciseSleep
from benchmarks.shared.stand_in_model import StandInModel, StandInWorker
from inflight.config.architecture import ModelArchitecture
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.models.causal_lm import ModelStep

FORWARD_SECONDS = 0.005
NUM_TABLE_ROWS = 64
WORKER_CLASS = "benchmarks.overlap.mock_device:MockDeviceWorker"


class MockModel(StandInModel):
    """Hands the input ids on as hidden states, and looks their logits up."""

    def _set_up(self, architecture: ModelArchitecture, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self._table = torch.randn(NUM_TABLE_ROWS, architecture.vocab_size, generator=generator)
        self._logits = self._table[:0]  # memory of its own, used again: fresh pages cost more than the copy
        self._ends_at = 0.0
        self._sleep = PreciseSleep()

    def forward(self, step: ModelStep) -> Tensor | IntermediateTensors:
        self._ends_at = time.perf_counter() + FORWARD_SECONDS
        return step.input_ids if step.rows is None else step.input_ids[step.rows]

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """The end of every forward pass."""
        if len(hidden) > len(self._logits):
            self._logits = torch.empty(len(hidden), self._table.shape[1])
        logits = torch.index_select(self._table, 0, hidden % NUM_TABLE_ROWS, out=self._logits[: len(hidden)])
        self._sleep.until(self._ends_at)
        return logits


class MockDeviceWorker(StandInWorker):
    """The real worker with `MockModel`."""

    model_class = MockModel

    def pid(self) -> int:
        return os.getpid()
