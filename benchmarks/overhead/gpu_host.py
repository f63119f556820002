"""The host's part of a step on a GPU: the engine over a device that does nothing, at once.

    python -m benchmarks.gpu_host [--batch 1 64 256] [--tokens 400] [--profile]

Everything of a step runs but what a GPU would do: scheduling, preparation, staging, launches (of nothing), copies out, commit.
So the period of a step is the least that a GPU can be given steps in; the launches themselves, some 10 us a graph, come on top.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.shared.report import emit, print_table
from inflight import LLM, SamplingParams
from inflight.attention.backend import AttentionBackend
from inflight.config.cuda_driver import Gpu
from inflight.config.machine import Machine
from inflight.device.accelerator import SWITCH_SECONDS, Accelerator, Event, Stream

T = TypeVar("T")

NUM_MULTIPROCESSORS = 132
PROMPT_TOKENS, WARM_UP_STEPS = 64, 50
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


class Done(Event):
    def synchronize(self) -> None:
        """It has happened."""


class Nothing(Stream):
    def enqueue(self, work: Callable[[], None]) -> None:
        """Dropped."""

    def record(self) -> Event:
        return Done()

    def wait(self, event: Event) -> None:
        """It is."""


class CopiesNothing(Nothing):
    """Copies allocate what they are copied to."""

    def enqueue(self, work: Callable[[], None]) -> None:
        work()


class NullGpu(Accelerator):
    kind = "cuda"
    torch_device = torch.device("cpu")
    num_multiprocessors = NUM_MULTIPROCESSORS
    max_shared_bytes = 227 << 10

    def __init__(self) -> None:
        self.compute, self.copy_in, self.copy_out = Nothing(), Nothing(), CopiesNothing()
        self._drain = ThreadPoolExecutor(1, "null-drain")
        sys.setswitchinterval(SWITCH_SECONDS)

    def new_stream(self) -> Stream:
        return Nothing()

    def available_memory_bytes(self) -> int:
        return 1 << 32

    def total_memory_bytes(self) -> int:
        return 1 << 32

    def measure_peak_bytes(self, work: Callable[[], object]) -> int:
        return 0

    def allocate_arena(self, num_blocks: int, block_bytes: int) -> Tensor:
        return torch.empty(num_blocks, block_bytes, dtype=torch.uint8)

    def to_device(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array.copy())

    def pinned(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(num_elements, dtype=dtype)

    def pinned_pages(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def enter_thread(self) -> None:
        """Any thread may use it."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def drain(self, work: Callable[[], T]) -> Future[T]:
        return self._drain.submit(work)

    def set_num_threads(self, num_threads: int) -> None:
        """None compute."""

    def synchronize(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        self._drain.shutdown(wait=True)


def step_seconds(llm: LLM, batch: int, num_tokens: int) -> float:
    """The median period of a step of `batch` decodes, outputs taken at the end."""
    params = SamplingParams(temperature=0.0, max_tokens=WARM_UP_STEPS + num_tokens, ignore_eos=True)
    engine = llm.llm_engine
    for i in range(batch):
        engine.add_request(f"{batch}-{i}", [1 + i] * PROMPT_TOKENS, params)
    times: list[float] = []
    while engine.has_unfinished_requests():
        engine.step()
        times.append(time.perf_counter())
    return median(np.diff(times[WARM_UP_STEPS:-WARM_UP_STEPS]).tolist())


def null_engine(folder: Path, max_num_seqs: int) -> LLM:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    gpu = Gpu(
        name="none", compute_capability=(9, 0), num_multiprocessors=NUM_MULTIPROCESSORS, total_memory_bytes=1 << 32
    )
    machine = Machine(device="cuda", num_cores=1, dtypes=("float32",), gpus=(gpu,))

    def backend(*_: object, **__: object) -> AttentionBackend:
        from inflight.attention.triton_paged import TritonPagedBackend

        return TritonPagedBackend(NullGpu.torch_device, num_multiprocessors=NUM_MULTIPROCESSORS)

    with (
        mock.patch("inflight.engine.start.model_files.detect_machine", return_value=machine),
        mock.patch("inflight.worker.worker.get_device", return_value=NullGpu()),
        mock.patch("inflight.worker.worker.get_backend", backend),
    ):
        return LLM(
            str(folder),
            device="cuda",
            load_format="dummy",
            skip_tokenizer_init=True,
            max_num_seqs=max_num_seqs,
            kv_cache_memory_bytes=1 << 28,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--profile", action="store_true", help="where the engine's thread spends it")
    arguments = parser.parse_args()
    profiler = cProfile.Profile()
    rows = []
    with tempfile.TemporaryDirectory() as folder, null_engine(Path(folder), max(arguments.batch)) as llm:
        for batch in arguments.batch:
            if arguments.profile:
                profiler.enable()
            rows.append({"batch": batch, "step_us": round(1e6 * step_seconds(llm, batch, arguments.tokens), 1)})
            profiler.disable()
    for row in rows:
        emit(**row)
    print_table(("batch", "step, us"), [(row["batch"], row["step_us"]) for row in rows])
    if arguments.profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
