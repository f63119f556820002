"""The models and the sizes of the GPU's figures, and their small stand-ins for a machine without one."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

CONFIGS = Path(__file__).parent / "configs"  # a folder a shape: its config.json, and no weights
FIRST_TOKEN_ID, MAX_TOKEN_ID = 3, 500  # of random prompts; within every vocabulary


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Batch sizes, lengths in tokens, and how often each thing is measured."""

    batches: tuple[int, ...]
    traced_batches: tuple[int, ...]  # those whose kernels are looked at
    prompt_len: int
    output_len: int
    traced_steps: int
    prefill_lens: tuple[int, ...]
    num_prefills: int
    long_contexts: tuple[tuple[int, int], ...]  # requests, and tokens of each
    beside_len: int  # of the prompt beside them
    num_sequences: int  # of the throughput workload
    sequence_lens: tuple[int, int]  # of its prompts and of its outputs, drawn from this interval
    read_bytes: int  # of the tensors that are read and copied to measure the bandwidth
    matrix_size: int
    compared_batches: tuple[int, ...]  # in turns with transformers
    rounds: int  # of that

    @property
    def max_model_len(self) -> int:
        longest = (self.prompt_len + self.output_len, max(self.prefill_lens) + 1, 2 * self.sequence_lens[1])
        return max(longest) + 16


GPU = Sizes(
    batches=(1, 8, 32, 64, 256), traced_batches=(1, 64), prompt_len=64, output_len=256, traced_steps=64,
    prefill_lens=(512, 1024, 2048, 4096, 8192, 32768), num_prefills=3,
    long_contexts=((1, 32000), (8, 32000), (64, 8000)), beside_len=512, num_sequences=256, sequence_lens=(100, 1024),
    read_bytes=4 << 30, matrix_size=8192,
    compared_batches=(1, 64), rounds=2,
)  # fmt: skip
QUICK = Sizes(
    batches=(1, 64), traced_batches=(1,), prompt_len=64, output_len=128, traced_steps=32,
    prefill_lens=(4096,), num_prefills=2,
    long_contexts=((8, 4000),), beside_len=512, num_sequences=64, sequence_lens=(100, 512),
    read_bytes=1 << 30, matrix_size=8192,
    compared_batches=(1, 64), rounds=1,
)  # fmt: skip
CPU = Sizes(
    batches=(1, 4), traced_batches=(1,), prompt_len=8, output_len=16, traced_steps=4,
    prefill_lens=(64,), num_prefills=1, long_contexts=((2, 32),), beside_len=8, num_sequences=4, sequence_lens=(8, 16),
    read_bytes=1 << 22, matrix_size=128,
    compared_batches=(1, 2), rounds=1,
)  # fmt: skip


def sizes_of(device: str, *, quick: bool) -> Sizes:
    if device == "cpu":
        return CPU
    return QUICK if quick else GPU


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Token ids, the same in every run."""
    rng = random.Random(seed)
    return [[rng.randrange(FIRST_TOKEN_ID, MAX_TOKEN_ID) for _ in range(length)] for length in lengths]


def random_lengths(count: int, interval: tuple[int, int], seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(*interval) for _ in range(count)]
