"""A device whose forward pass takes a fixed time and no processor: the real worker, runner and sampler with another model.

The logits of a token's successor are a row of a fixed random table, so what is drawn depends on what was drawn before. They are
copied within the time of the forward; if that takes longer (a row of 151,936 is 0.6 MB), so does the forward.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time

import torch
from torch import Tensor

from inflight.attention.backend import AttentionBackend
from inflight.attention.metadata import AttentionMetadata
from inflight.config.architecture import ModelArchitecture
from inflight.config.partition import PipelineStage
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.attention import Attention
from inflight.layers.weights import Loadable
from inflight.models.causal_lm import CausalLM
from inflight.worker.worker import Worker

FORWARD_SECONDS = 0.005
SPIN_SECONDS = 0.0001  # the end of a forward: a sleeper wakes this much too late
NUM_TABLE_ROWS = 64
WORKER_CLASS = "benchmarks.mock_device:MockDeviceWorker"
_PR_SET_TIMERSLACK = 29


class MockModel(CausalLM):
    """Hands the input ids on as hidden states, and looks their logits up."""

    def __init__(
        self,
        architecture: ModelArchitecture,
        *,
        dtype: torch.dtype,
        device: torch.device,
        backend: AttentionBackend,
        tp: TensorParallelGroup,
        stage: PipelineStage,
    ) -> None:
        super().__init__(architecture, dtype=dtype, device=device, backend=backend, tp=tp, stage=stage)
        generator = torch.Generator().manual_seed(0)
        self._table = torch.randn(NUM_TABLE_ROWS, architecture.vocab_size, generator=generator)
        self._logits = self._table[:0]  # memory of its own, used again: fresh pages cost more than the copy
        self._ends_at = 0.0
        self._precise_threads = threading.local()
        self._layers = {
            f"layers.{index}": Attention(
                f"layers.{index}",
                num_heads=architecture.num_heads,
                num_kv_heads=architecture.num_kv_heads,
                head_dim=architecture.head_dim,
                scale=1.0,
                sliding_window=None,
                backend=backend,
            )
            for index in range(stage.start, stage.stop)
        }

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attn_metadata: tuple[AttentionMetadata, ...],
        rows: Tensor | None = None,
        num_layers: int | None = None,
        *,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:
        self._ends_at = time.perf_counter() + FORWARD_SECONDS
        return input_ids if rows is None else input_ids[rows]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The end of every forward pass."""
        if len(hidden) > len(self._logits):
            self._logits = torch.empty(len(hidden), self._table.shape[1])
        logits = torch.index_select(self._table, 0, hidden % NUM_TABLE_ROWS, out=self._logits[: len(hidden)])
        self._sleep_until_the_end()
        return logits

    def attention_layers(self) -> dict[str, Attention]:
        return self._layers

    def load_units(self) -> list[tuple[str, Loadable]]:
        return []

    def _sleep_until_the_end(self) -> None:
        if not getattr(self._precise_threads, "is_this_one", False):
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # nanoseconds; 50,000 by default
            self._precise_threads.is_this_one = True
        rest = self._ends_at - SPIN_SECONDS - time.perf_counter()
        if rest > 0:
            time.sleep(rest)
        while time.perf_counter() < self._ends_at:
            time.sleep(0)  # lets other threads run, as a device does


class MockDeviceWorker(Worker):
    """The real worker with `MockModel`."""

    def _load_stage(self, backend: AttentionBackend) -> CausalLM:
        config = self._config.model
        return MockModel(
            config.architecture,
            dtype=getattr(torch, config.dtype),
            device=self._device.torch_device,
            backend=backend,
            tp=self._tp,
            stage=self._stage,
        )

    def pid(self) -> int:
        return os.getpid()
