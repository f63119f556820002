"""Calls of the kernels that read and write what a request keeps: attention, and layers with a recurrent state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from inflight.attention.backend import AttentionParams, LayerCache
from inflight.attention.cpu_paged import CpuPagedBackend, CpuPagedMetadata, _step_struct
from inflight.attention.metadata import AttentionInputs
from inflight.interface.kv_cache import KVCacheSpec
from inflight.kernels.cpu.functions import AttentionStep
from inflight.kernels.cpu.gated_delta import CpuGatedDelta
from inflight.kernels.gated_delta import GatedDeltaShape, GatedDeltaWeights
from inflight.kernels.short_conv import CpuShortConv
from tests.unit.kernels.cpu.kernel_call import BFLOAT16, FLOAT32, FLOATS, FULL, INT8, Call, Kernels

STEPS = [[(0, 1)], [(0, 17), (15, 1), (31, 3)]]  # (computed tokens, new tokens) of each row
LONG_STEPS = [[(1100, 30), (5, 1)], [(0, 150)] * 3]  # splits of long rows, and tiles of many rows


def attention(kernels: Kernels) -> Iterator[Call]:
    dims = [8, 16, 24, 32, 48, 80, 128, 512, 520, 528, 576] if not FULL else [*range(4, 144, 4), 512, 520, 528, 576]
    for head_dim in dims:
        for dtype, cache_dtype in [(FLOAT32, FLOAT32), (BFLOAT16, BFLOAT16), (FLOAT32, INT8), (BFLOAT16, INT8)]:
            is_supported = head_dim % 16 == 0 and (cache_dtype != INT8 or head_dim <= 512)
            yield attend(kernels, head_dim, dtype, cache_dtype, STEPS, is_supported=is_supported)
            for value_dim in {16, 24, head_dim - 16, head_dim}:
                fits = is_supported and value_dim % 16 == 0 and 0 < value_dim < head_dim
                if value_dim > 0:
                    yield attend(
                        kernels,
                        head_dim,
                        dtype,
                        cache_dtype,
                        STEPS,
                        value_dim=value_dim,
                        num_kv_heads=1,
                        is_supported=fits,
                    )
    for block_size in (8, 16, 24, 48):
        yield attend(kernels, 32, BFLOAT16, INT8, STEPS, block_size=block_size, is_supported=block_size % 16 == 0)
    yield attend(kernels, 32, BFLOAT16, BFLOAT16, STEPS, per_head=1, window=3, soft_cap=5.0, has_sinks=True)
    for bias_radius in (0, 5, 200):
        yield attend(kernels, 32, FLOAT32, FLOAT32, [*STEPS, *LONG_STEPS], bias_radius=bias_radius, is_causal=False)
    for window in (None, 3):
        yield attend(kernels, 32, BFLOAT16, BFLOAT16, [*STEPS, *LONG_STEPS], window=window, is_causal=False)
        yield attend(kernels, 32, BFLOAT16, BFLOAT16, [*STEPS, *LONG_STEPS], window=window, has_images=True)
    for num_threads in (1, 3):
        for dtype, cache_dtype in [(FLOAT32, FLOAT32), (BFLOAT16, BFLOAT16), (BFLOAT16, INT8)]:
            for value_dim in (None, 32):
                yield attend(
                    kernels,
                    64,
                    dtype,
                    cache_dtype,
                    LONG_STEPS,
                    value_dim=value_dim,
                    num_kv_heads=1,
                    num_threads=num_threads,
                )


def attend(
    kernels: Kernels,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    steps: Sequence[list[tuple[int, int]]],
    *,
    value_dim: int | None = None,
    num_kv_heads: int = 2,
    per_head: int = 3,
    block_size: int = 16,
    window: int | None = None,
    soft_cap: float | None = None,
    has_sinks: bool = False,
    is_causal: bool = True,
    has_images: bool = False,
    bias_radius: int | None = None,
    num_threads: int = 1,
    is_supported: bool = True,
) -> Call:
    memory, backend = kernels.memory, CpuPagedBackend(kernels.library)
    spec = KVCacheSpec(
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=str(cache_dtype).removeprefix("torch."),
        itemsize=cache_dtype.itemsize,
        scale_bytes=0 if cache_dtype != INT8 else 4,
        has_values=value_dim is None,
        sliding_window=window,
    )
    num_heads = num_kv_heads * per_head

    def run_step(rows: list[tuple[int, int]]) -> None:
        counts = [-(-(computed + new) // block_size) for computed, new in rows]
        view = backend.kv_cache_view(memory.zeros(sum(counts) + 1, spec.block_bytes, dtype=torch.uint8), spec, 0)
        table, first = torch.zeros(len(rows), max(counts), dtype=torch.int32), 1
        for row, count in enumerate(counts):
            table[row, :count] = torch.arange(first, first + count)
            first += count
        starts = torch.tensor([0, *(new for _, new in rows)]).cumsum(0)
        arrays = starts, torch.tensor(rows).sum(1), torch.tensor(rows)[:, 0], table
        query_start_loc, seq_lens, computed, block_table = (memory.copy(x.int()).numpy() for x in arrays)
        inputs = AttentionInputs(
            query_start_loc=query_start_loc, seq_lens=seq_lens, num_computed_tokens=computed, block_table=block_table
        )
        num_tokens = int(starts[-1])
        step = _step_struct(inputs, spec)
        ends = memory.copy(torch.from_numpy(seq_lens).repeat_interleave(starts.diff()))  # each row is an image
        if has_images:
            step.ends = ends.data_ptr()
        metadata = CpuPagedMetadata(num_tokens=num_tokens, step=step, inputs=inputs)
        query, key, value = (
            memory.normal(num_tokens, n, head_dim, dtype=dtype) for n in (num_heads, *[num_kv_heads] * 2)
        )
        sinks = memory.normal(num_heads) if has_sinks else None
        bias = None if bias_radius is None else memory.normal(num_heads, 2 * bias_radius + 1)
        params = AttentionParams(0.3, window, soft_cap, sinks, value_dim, is_causal, has_images, bias)
        backend.forward(query, key, value if value_dim is None else key[:, :0], LayerCache(view, metadata, params))
        if is_supported:
            assert backend.scratch_bytes(spec, per_head=per_head, num_threads=1) > 0

    def run() -> None:
        torch.set_num_threads(num_threads)
        try:
            for rows in steps:
                run_step(rows)
        finally:
            torch.set_num_threads(1)

    name = f"attention heads of {head_dim} (values {value_dim}), {dtype}, cache {cache_dtype}, blocks of {block_size}"
    name += "" if is_causal else f", both directions, window {window}"
    name += f", images, window {window}" if has_images else ""
    name += "" if bias_radius is None else f", biases of positions up to {bias_radius}"
    return Call(f"{name}, {len(steps[0])} rows, {num_threads} threads", run, is_supported)


# -- recurrent layers --------------------------------------------------------------------------------------------------


def recurrent(kernels: Kernels) -> Iterator[Call]:
    widths = [8, 16, 24, 32, 48, 64] if not FULL else range(4, 132, 4)
    for dtype in FLOATS:
        for key_dim, value_dim in [*((size, 32) for size in widths), *((16, size) for size in widths)]:
            yield delta(kernels, dtype, key_dim=key_dim, value_dim=value_dim, kernel_size=4)
        for kernel_size in (0, 1, 2, 8, 9):
            yield delta(kernels, dtype, key_dim=16, value_dim=32, kernel_size=kernel_size)
            yield convolve(kernels, dtype, 16, kernel_size)
        for num_channels in widths:
            yield convolve(kernels, dtype, num_channels, 3)


def steps_of(kernels: Kernels, block_size: int, state_bytes: int) -> Iterator[tuple[int, Tensor, AttentionStep]]:
    """Steps of one row, of three rows of which one computes nothing, and of drafts: the number of tokens, the states, and the
    struct."""
    for num_states, rows in (
        (1, [(0, 1)]),
        (1, [(0, 3 * block_size + 1), (block_size, 0), (block_size - 1, 40)]),
        (4, [(block_size - 2, 4), (3, 2), (0, 9)]),
    ):
        counts = [-(-(computed + new) // block_size) for computed, new in rows]
        table, first = torch.zeros(len(rows), max(counts), dtype=torch.int32), 1
        for row, count in enumerate(counts):
            table[row, :count] = torch.arange(first, first + count)
            first += count
        starts = torch.tensor([0, *(new for _, new in rows)]).cumsum(0)
        tensors = starts, torch.tensor(rows).sum(1), torch.tensor(rows)[:, 0], table
        guarded = [kernels.memory.copy(x.int()) for x in tensors]
        pointers = (x.data_ptr() for x in guarded)
        states = kernels.memory.zeros(first, num_states * state_bytes, dtype=torch.uint8)
        step = AttentionStep(len(rows), block_size, 2, table.shape[1], *pointers, state_bytes, num_states)
        yield int(starts[-1]), states, step
        del guarded


def delta(kernels: Kernels, dtype: torch.dtype, *, key_dim: int, value_dim: int, kernel_size: int) -> Call:
    memory = kernels.memory
    shape = GatedDeltaShape(
        num_key_heads=2, num_value_heads=4, key_dim=key_dim, value_dim=value_dim, kernel_size=kernel_size
    )

    def run() -> None:
        conv = memory.normal(kernel_size, shape.num_channels)
        rates, bias, norm = memory.normal(4).exp_(), memory.normal(4), memory.normal(value_dim)
        weights = GatedDeltaWeights(conv=conv, rates=rates, step_bias=bias, norm=norm, eps=1e-6)
        kernel = CpuGatedDelta(kernels.library, shape, weights)
        matrix_bytes = 4 * key_dim * value_dim * 4
        num_bytes = matrix_bytes + (kernel_size - 1) * shape.num_channels * dtype.itemsize
        for num_tokens, states, step in steps_of(kernels, 16, num_bytes):
            rows = memory.normal(num_tokens, sum(shape.row_parts), dtype=dtype)
            kernel(rows, states, [0, matrix_bytes, num_bytes], step)

    is_supported = key_dim % 16 == 0 and value_dim % 32 == 0 and 1 <= kernel_size <= 8
    return Call(f"gated delta {key_dim} x {value_dim}, {kernel_size} tokens, {dtype}", run, is_supported)


def convolve(kernels: Kernels, dtype: torch.dtype, num_channels: int, kernel_size: int) -> Call:
    memory = kernels.memory

    def run() -> None:
        for bias in (None, memory.normal(num_channels)):
            kernel = CpuShortConv(kernels.library, memory.normal(kernel_size, num_channels), bias)
            size = (kernel_size - 1) * num_channels * dtype.itemsize
            for num_tokens, states, step in steps_of(kernels, 16, size):
                kernel(memory.normal(num_tokens, 3 * num_channels, dtype=dtype), states, [0, size], step)

    is_supported = num_channels % 16 == 0 and 1 <= kernel_size <= 8
    return Call(f"short convolution of {num_channels} channels, {kernel_size} tokens, {dtype}", run, is_supported)
