"""A model sharded over ranks computes what the whole model computes. The ranks are threads that meet at a barrier."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inflight.config.engine import ModelConfig
from inflight.config.parse_architecture import parse_architecture
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.model_loader.loader import load_model
from tests.full_context_attention import FullContextAttention, run_prompt
from tests.model_zoo import FAMILY_CONFIGS, write_model

PROMPT = torch.arange(3, 40)


class Meeting:
    """Where the ranks put their tensors and take those of all."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.tensors: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.tensors[rank] = x
        self.barrier.wait()
        everyone = list(self.tensors)
        self.barrier.wait()
        return everyone


class ThreadGroup(TensorParallelGroup):
    def __init__(self, size: int, rank: int, meeting: Meeting) -> None:
        super().__init__(size, rank)
        object.__setattr__(self, "meeting", meeting)

    meeting: Meeting

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x)).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, x), dim=-1)


def logits(folder: Path, tp: TensorParallelGroup, load_format: str) -> Tensor:
    architecture = parse_architecture(json.loads((folder / "config.json").read_text()))
    config = ModelConfig(
        folder=folder,
        name="x",
        architecture=architecture,
        dtype="float32",
        max_model_len=64,
        load_format=load_format,
        seed=5,
        fingerprint="",
    )
    backend: Any = FullContextAttention()  # Any: a stand-in
    return run_prompt(load_model(config, device=torch.device("cpu"), backend=backend, tp=tp), PROMPT)


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
@pytest.mark.parametrize(
    ("family", "index", "size"),
    [
        ("llama", 0, 2),
        ("llama", 0, 4),  # two key heads on four ranks
        ("llama", 1, 2),  # one key head
        ("llama", 6, 2),  # biases
        ("qwen3", 1, 4),  # tied, one key head, norms on heads
        ("qwen2", 3, 2),  # biases and windows
    ],
)
def test_the_ranks_together_are_the_whole(tmp_path: Path, family: str, index: int, size: int, load_format: str) -> None:
    folder = write_model(FAMILY_CONFIGS[family][index], tmp_path / "model", seed=2)
    truth = logits(folder, TensorParallelGroup(), load_format)
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as ranks:
        running = [ranks.submit(logits, folder, ThreadGroup(size, rank, meeting), load_format) for rank in range(size)]
        for rank_logits in running:
            torch.testing.assert_close(rank_logits.result(), truth, rtol=1e-4, atol=1e-4)
