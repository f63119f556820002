"""How close paged attention on the CPU comes to the memory's speed in decode, and to the dot products' in prefill.

    python -m benchmarks.attention_kernel [--shapes qwen3-0.6b llama-1b] [--kv-cache-dtypes bfloat16 int8] [--block-size 16]
                                          [--num-threads 1 2] [--arena-bytes 3221225472] [--seconds 0.5]

One call is one layer of a step. The arena has all layers of the model and calls rotate over them, so that nothing is left in
the processor's cache. Where the contexts of a case need more blocks than the arena has, requests share blocks, far enough apart
in time that they are read from memory again. The yardsticks are measured in the same process: torch's sum over the arena, and a
large bf16 product of oneDNN.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.shared.models import SHAPES
from benchmarks.shared.report import emit, print_table
from inflight.attention.backend import AttentionBackend, AttentionParams, LayerCache
from inflight.attention.metadata import AttentionInputs
from inflight.attention.selector import get_backend
from inflight.device.cpu import CpuDevice
from inflight.interface.kv_cache import KVCacheSpec

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """`num_rows` requests, each with `num_queries` tokens that end a context of `context` tokens."""

    num_rows: int
    num_queries: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.num_rows} x {self.num_queries} at {self.context}"


DECODES = tuple(Case(rows, 1, context) for rows in (1, 8, 32) for context in (128, 1024, 4096, 8192))
PREFILLS = (Case(1, 1024, 1024), Case(1, 2048, 4096), Case(1, 2048, 8192))


class Layers:
    """All layers' caches of one shape in one arena, filled; `call` runs a step's attention on the next layer."""

    def __init__(self, shape: str, kv_cache_dtype: str, block_size: int, arena_bytes: int, device: CpuDevice) -> None:
        fields = SHAPES[shape].fields
        self.num_heads, self.num_kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
        self.params = AttentionParams(fields["head_dim"] ** -0.5)
        self.head_dim, self.num_layers = fields["head_dim"], fields["num_hidden_layers"]
        dtype: torch.dtype = getattr(torch, kv_cache_dtype)
        self.spec = KVCacheSpec(
            block_size=block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=kv_cache_dtype,
            itemsize=dtype.itemsize,
            scale_bytes=0 if dtype.is_floating_point else torch.float32.itemsize,
        )
        self.backend: AttentionBackend = get_backend("cpu", [self.head_dim], block_size, DTYPE, dtype)
        block_bytes = self.num_layers * self.spec.block_bytes
        self.num_blocks = arena_bytes // block_bytes
        self.arena = device.allocate_arena(self.num_blocks, block_bytes)
        self.views = [self.backend.kv_cache_view(self.arena, self.spec, i) for i in range(self.num_layers)]
        self._fill()

    def _fill(self) -> None:
        """A few blocks through the backend, as the layout is its own; the others are copies."""
        size, made = self.spec.block_size, min(self.num_blocks, 32)
        inputs = AttentionInputs(
            query_start_loc=np.arange(made + 1, dtype=np.int32) * np.int32(size),
            seq_lens=np.full(made, size, np.int32),
            num_computed_tokens=np.zeros(made, np.int32),
            block_table=np.arange(made, dtype=np.int32)[:, None],
        )
        metadata = self.backend.build_metadata(inputs, self.spec)
        for view in self.views:
            self.backend.forward(*self._rows(made * size), LayerCache(view, metadata, self.params))
        for start in range(made, self.num_blocks, made):
            part = self.arena[start : start + made]
            part.copy_(self.arena[: len(part)])

    def _rows(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        packed = torch.randn(num_tokens, sum(heads), self.head_dim).to(DTYPE)
        query, key, value = torch.split(packed, heads, dim=1)
        return query, key, value

    def caller(self, case: Case, seed: int = 0) -> Callable[[], object]:
        """Blocks are taken in a random order, round and round."""
        width = -(-case.context // self.spec.block_size)
        order = np.random.default_rng(seed).permutation(self.num_blocks).astype(np.int32)
        assert width <= self.num_blocks, "one context does not fit the arena"
        inputs = AttentionInputs(
            query_start_loc=np.arange(case.num_rows + 1, dtype=np.int32) * np.int32(case.num_queries),
            seq_lens=np.full(case.num_rows, case.context, np.int32),
            num_computed_tokens=np.full(case.num_rows, case.context - case.num_queries, np.int32),
            block_table=np.resize(order, (case.num_rows, width)),
        )
        metadata = self.backend.build_metadata(inputs, self.spec)
        rows = self._rows(case.num_rows * case.num_queries)
        views = itertools.cycle(self.views)
        return lambda: self.backend.forward(*rows, LayerCache(next(views), metadata, self.params))

    def read_bytes(self, case: Case) -> int:
        """Keys and values, scales included, that a call reads once."""
        return case.num_rows * case.context * self.spec.bytes_per_token

    def flops(self, case: Case) -> int:
        seen = case.num_queries * case.context - case.num_queries * (case.num_queries - 1) // 2
        return 4 * int(self.num_heads) * int(self.head_dim) * case.num_rows * seen


def fastest_seconds(call: Callable[[], object], seconds: float) -> float:
    """Of one call, out of as many as the time allows, at least three: whatever else runs on the machine only adds time."""
    call()
    fastest, end = math.inf, time.perf_counter() + seconds
    for count in itertools.count():
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        fastest = min(fastest, now - start)
        if now > end and count >= 2:
            return fastest
    raise AssertionError("unreachable")


def yardsticks(arena: torch.Tensor, seconds: float) -> tuple[float, float]:
    """(GB/s read, bf16 GFLOP/s) of torch with the threads that are set."""
    words = arena.view(-1)[: 2**30].view(torch.float32)
    left, right = torch.randn(2, 1024, 1024).to(DTYPE)
    read = fastest_seconds(lambda: torch.sum(words), seconds)
    product = fastest_seconds(lambda: torch.mm(left, right), seconds)
    return words.nbytes / read / 1e9, 2 * 1024**3 / product / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description="Paged attention on the CPU against memory and dot products.")
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b", "llama-1b"], choices=sorted(SHAPES))
    parser.add_argument("--kv-cache-dtypes", nargs="+", default=["bfloat16", "int8"], choices=["bfloat16", "int8"])
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block [%(default)s]")
    parser.add_argument("--num-threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--arena-bytes", type=int, default=3 << 30, help="of one shape's cache [%(default)s]")
    parser.add_argument("--seconds", type=float, default=0.5, help="per case [%(default)s]")
    args = parser.parse_args()
    rows: list[list[object]] = []
    for shape, dtype in itertools.product(args.shapes, args.kv_cache_dtypes):
        layers = Layers(shape, dtype, args.block_size, args.arena_bytes, CpuDevice())
        for num_threads in args.num_threads:
            torch.set_num_threads(num_threads)
            read, dot = yardsticks(layers.arena, args.seconds)
            rows.append([f"{shape} {dtype}", num_threads, "yardsticks", "", round(read, 1), round(dot)])
            for case in (*DECODES, *PREFILLS):
                time_of_call = fastest_seconds(layers.caller(case), args.seconds)
                figures = {
                    "microseconds": round(time_of_call * 1e6, 1),
                    "gigabytes_per_second": round(layers.read_bytes(case) / time_of_call / 1e9, 1),
                    "gflops": round(layers.flops(case) / time_of_call / 1e9),
                }
                emit(
                    benchmark="attention_kernel",
                    shape=shape,
                    kv_cache_dtype=dtype,
                    block_size=args.block_size,
                    num_threads=num_threads,
                    case=case.name,
                    **figures,
                )
                rows.append([f"{shape} {dtype}", num_threads, case.name, *figures.values()])
    print_table(["shape, KV", "threads", "requests x tokens at context", "us", "GB/s", "GFLOP/s"], rows)


if __name__ == "__main__":
    main()
