"""Calls every C++ kernel through its wrapper, with buffers beside pages that nothing may touch, or under the address sanitizer.

This is a program: `python -m tests.unit.kernels.cpu.kernel_calls INSTRUCTION_SET...`. With `--sanitized FOLDER` it opens the
libraries in this folder, and torch allocates the memory, as the address sanitizer wants it. Each instruction set has a process
of its own. The program prints the name of each call before it makes it. So if a process ends too early, its last line names the
call. Results are not looked at: the kernels' own tests do that. In further processes, a call touches an element beside its
buffer.

The sizes are the smallest ones, those around the widths of vectors and tiles, and larger ones. If a size is not supported, the
wrapper must refuse it.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inflight.attention.backend import AttentionParams, LayerCache
from inflight.attention.cpu_paged import CpuPagedBackend, CpuPagedMetadata, _step_struct
from inflight.attention.metadata import AttentionInputs
from inflight.config.architecture import GELU_TANH, SIGMOID, SILU
from inflight.config.experts import MoeSpec, RouterSpec
from inflight.distributed.shared_collectives import PIECE_BYTES, SharedCollectives
from inflight.errors import ConfigError
from inflight.interface.kv_cache import KVCacheSpec
from inflight.kernels.cpu import library
from inflight.kernels.cpu.experts import CpuExperts
from inflight.kernels.cpu.functions import DTYPES, SIGNATURES, AttentionStep
from inflight.kernels.cpu.gated_delta import CpuGatedDelta
from inflight.kernels.cpu.layer_ops import CpuLayerOps
from inflight.kernels.cpu.linear import PackedLinear
from inflight.kernels.cpu.packed_heads import PackedHeads
from inflight.kernels.cpu.packing import pack_float, pack_integers, quantize_rows
from inflight.kernels.cpu.recording import KernelLibrary
from inflight.kernels.cpu.tape import Recorder
from inflight.kernels.gated_delta import GatedDeltaShape, GatedDeltaWeights
from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.kernels.short_conv import CpuShortConv
from inflight.kernels.token_masks import cpu_apply_token_masks
from tests.unit.kernels.cpu.guarded_memory import GuardedMemory, Side

FULL = os.environ.get("INFLIGHT_TEST_FULL") == "1"
TORCH_EMPTY = torch.empty
FLOAT32, BFLOAT16, INT8 = torch.float32, torch.bfloat16, torch.int8
FLOATS = (FLOAT32, BFLOAT16)
EDGES = [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 100]  # widths of vectors and panels, and their neighbours
SIZES = list(range(1, 131)) if FULL else EDGES


class Call(NamedTuple):
    name: str
    run: Callable[[], object]
    is_supported: bool = True


class Kernels(NamedTuple):
    library: KernelLibrary
    memory: GuardedMemory


def calls(kernels: Kernels) -> Iterator[Call]:
    for part in (attention, recurrent, linear, integers, experts, between_products, token_masks, collectives, tape):
        yield from part(kernels)


# -- attention ---------------------------------------------------------------------------------------------------------

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
        metadata = CpuPagedMetadata(num_tokens=num_tokens, step=_step_struct(inputs, spec), inputs=inputs)
        query, key, value = (
            memory.normal(num_tokens, n, head_dim, dtype=dtype) for n in (num_heads, *[num_kv_heads] * 2)
        )
        sinks = memory.normal(num_heads) if has_sinks else None
        params = AttentionParams(0.3, window, soft_cap, sinks, value_dim)
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


# -- linear layers -----------------------------------------------------------------------------------------------------

ROWS = [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25]  # rows of tiles, and their neighbours


def multiply(kernels: Kernels, layer: PackedLinear, in_features: int, dtype: torch.dtype, rows: Sequence[int]) -> None:
    for num_rows in rows:
        for out_dtype in FLOATS:
            x = kernels.memory.normal(num_rows, in_features, dtype=dtype)
            layer(x, out_dtype)
            x[:, -1] *= 100  # an outlier in each row
            layer(x, out_dtype)


def linear(kernels: Kernels) -> Iterator[Call]:
    for dtype in FLOATS:
        for in_features in SIZES if FULL else [1, 2, 4, 6, 8, 16, 20, 32, 36, 64, 100]:
            yield floats(kernels, dtype, in_features, 33, rows=ROWS)
        for out_features in SIZES:
            yield floats(kernels, dtype, 20, out_features, rows=[1, 5])
            if out_features % 2 == 0:
                yield floats(kernels, dtype, 20, out_features, rows=[1, 5], gate=SILU)
        yield floats(kernels, dtype, 2048, 96, rows=[1, 300], gate=GELU_TANH, num_threads=3)  # tasks of several threads
        for in_features in (2, 4, 12, 64):
            yield of_heads(kernels, dtype, in_features)


def floats(
    kernels: Kernels,
    dtype: torch.dtype,
    in_features: int,
    out_features: int,
    *,
    rows: Sequence[int],
    gate: str | None = None,
    num_threads: int = 1,
) -> Call:
    def run() -> None:
        memory, first = kernels.memory, max(1, out_features // 2)
        parts = [memory.normal(n, in_features, dtype=dtype) for n in (first, out_features - first) if n]
        torch.set_num_threads(num_threads)
        for bias in (None, memory.normal(out_features, dtype=dtype)):
            layer = pack_float(kernels.library, memory, parts, bias, gate=gate)  # type: ignore[arg-type]  # for HugePages
            multiply(kernels, layer, in_features, dtype, rows)
        torch.set_num_threads(1)

    name = f"linear {out_features} x {in_features}, {dtype}, gate {gate}, {num_threads} threads"
    return Call(name, run, in_features % 4 == 0)


def of_heads(kernels: Kernels, dtype: torch.dtype, in_features: int) -> Call:
    memory = kernels.memory

    def run() -> None:
        weights = [memory.normal(17, in_features, dtype=dtype) for _ in range(3)]
        heads = [pack_float(kernels.library, memory, [weight], None, gate=None) for weight in weights]  # type: ignore[arg-type]
        packed = PackedHeads(kernels.library, heads)
        for num_rows in (1, 5):
            packed(memory.normal(num_rows, 3, in_features, dtype=dtype), memory.empty(num_rows, 3, 17, dtype=dtype))

    return Call(f"linear of heads, {in_features} features, {dtype}", run, in_features % 4 == 0)


def integers(kernels: Kernels) -> Iterator[Call]:
    for bits, in_features, group_size in [
        *((8, size, size) for size in (1, 2, 4, 6, 8, 12, 16, 20, 36, 64, 68)),
        *((4, 32 * groups, 32) for groups in (1, 2, 3)),
        *((4, 192, size) for size in (8, 16, 24, 32, 48, 64, 96, 192, 256)),
    ]:
        for out_features in (1, 17, 33):
            yield quantized(kernels, bits, in_features, group_size, out_features)
    for group_size in (32, 96):
        yield of_bytes(kernels, group_size)


def quantized(kernels: Kernels, bits: int, in_features: int, group_size: int, out_features: int) -> Call:
    memory = kernels.memory

    def run() -> None:
        for dtype in FLOATS:
            parts = [memory.normal(out_features, in_features, dtype=dtype) for _ in range(2)]
            weight = quantize_rows(kernels.library, parts, bits=bits, group_size=group_size)
            for bias, gate in ((None, SILU), (memory.normal(2 * out_features), None)):
                layer = pack_integers(kernels.library, memory, weight, bias, gate=gate)  # type: ignore[arg-type]
                multiply(kernels, layer, in_features, dtype, ROWS if FULL else [1, 3, 13])

    fits = in_features % 4 == 0 if bits == 8 else group_size % 32 == 0 and in_features % group_size == 0
    return Call(f"linear {bits} bits, {2 * out_features} x {in_features}, groups of {group_size}", run, fits)


def of_bytes(kernels: Kernels, group_size: int) -> Call:
    """A weight of 8 bits with groups, as a checkpoint may have it."""
    memory = kernels.memory

    def run() -> None:
        values = memory.copy(torch.randint(0, 256, (33, 2 * group_size), dtype=torch.uint8))
        scales, offsets = memory.normal(33, 2), memory.normal(33, 2)
        weight = QuantizedWeight(values=values, scales=scales, offsets=offsets, bits=8)
        layer = pack_integers(kernels.library, memory, weight, None, gate=None)  # type: ignore[arg-type]
        multiply(kernels, layer, 2 * group_size, BFLOAT16, [1, 13])

    return Call(f"linear 8 bits with groups of {group_size}", run)


# -- experts -----------------------------------------------------------------------------------------------------------


def experts(kernels: Kernels) -> Iterator[Call]:
    for dtype in FLOATS:
        for bits in (0, 4, 8):
            yield experts_of(kernels, dtype, bits, 64, 5, 2, rows=[1, 2, 33])
    for num_experts, top_k in ((1, 1), (7, 7), (16, 3), (17, 1), (1024, 8), (1025, 8), (4, 5)):
        yield experts_of(kernels, BFLOAT16, 0, 20, num_experts, top_k, rows=[1, 13])
    yield experts_of(kernels, BFLOAT16, 0, 36, 3, 2, rows=[1400], num_threads=3)  # batches of experts
    for groups in ({"num_groups": 5, "top_groups": 2}, {"num_groups": 1020, "top_groups": 8}):
        yield experts_of(kernels, FLOAT32, 0, 16, 1020, 8, rows=[1, 40], has_choice_bias=True, **groups)


def experts_of(
    kernels: Kernels,
    dtype: torch.dtype,
    bits: int,
    size: int,
    num_experts: int,
    top_k: int,
    *,
    rows: Sequence[int],
    num_threads: int = 1,
    **router: int,
) -> Call:
    """`bits`: of the weights; 0: they are floats. The hidden size and that of a shared expert are `size`, too. `router`: more
    fields of `RouterSpec`."""
    memory = kernels.memory

    def pack(gate: str | None) -> PackedLinear:
        weight = memory.normal(2 * size if gate else size, size, dtype=dtype)
        if not bits:
            return pack_float(kernels.library, memory, [weight], None, gate=gate)  # type: ignore[arg-type]
        quantized = quantize_rows(kernels.library, [weight], bits=bits, group_size=32)
        return pack_integers(kernels.library, memory, quantized, None, gate=gate)  # type: ignore[arg-type]

    def run() -> None:
        given = RouterSpec(top_k=top_k, **router)  # type: ignore[arg-type]
        spec = MoeSpec(num_experts=num_experts, size=size, router=given, shared_size=size, has_shared_gate=True)
        bias = memory.normal(num_experts) if given.has_choice_bias else None
        packed = [[pack(gate) for _ in range(num_experts + 1)] for gate in (SILU, None)]
        layer = CpuExperts(kernels.library, spec, packed[0], packed[1], dtype, bias)
        torch.set_num_threads(num_threads)
        for num_rows in rows:
            choices = layer.choose(memory.normal(num_rows, num_experts + 1))
            layer(memory.normal(num_rows, size, dtype=dtype), choices)
        torch.set_num_threads(1)

    name = f"{num_experts} experts of {size}, {bits} bits, {dtype}, {top_k} of them, {num_threads} threads"
    return Call(name, run, top_k <= num_experts <= 1024)


# -- between matrix products -------------------------------------------------------------------------------------------


def between_products(kernels: Kernels) -> Iterator[Call]:
    ops, memory = CpuLayerOps(kernels.library), kernels.memory

    def of_size(size: int, dtype: torch.dtype) -> None:
        x, delta, wide = (memory.normal(3, width, dtype=dtype) for width in (size, size, size + 3))
        weight = memory.normal(size, dtype=dtype)
        ops.rms_norm(x, weight, 1e-6)
        ops.rms_norm(wide[:, 3:], weight, 1e-6)
        ops.add_and_rms_norm(delta, x, weight, 1e-6)
        for activation in (SILU, GELU_TANH, SIGMOID):
            ops.multiply_activation(x, wide[:, 3:], activation)
        for factor in (None, memory.normal(1), memory.normal(3, 1)):
            ops.add_and_scale(x, delta, factor)
        ops.add_and_scale(x, None, memory.normal(1))
        heads = memory.normal(3, 2, size, dtype=dtype)
        ops.norm_heads(heads, memory.normal(2, size, dtype=dtype), 1e-6)
        ops.copy_heads(heads, memory.empty(3, 2, size, dtype=dtype))
        ops.select_rows(x, memory.copy(torch.tensor([2, 0, 2])))

    def rotate(size: int, dtype: torch.dtype) -> None:
        for weight in (None, memory.normal(2, size, dtype=dtype)):
            heads, cos, sin = memory.normal(3, 3, size, dtype=dtype), *memory.normal(2, 3, size, dtype=dtype)
            ops.norm_and_rotate(heads[:, 1:], weight, 1e-6, memory.copy(cos), memory.copy(sin))

    for dtype in FLOATS:
        for size in SIZES:
            yield Call(f"norms, gates and copies of {size}, {dtype}", partial(of_size, size, dtype))
            yield Call(f"rotation of {size}, {dtype}", partial(rotate, size, dtype), is_supported=size % 2 == 0)
    for index in (-1, 3):
        rows = memory.copy(torch.tensor([0, index]))
        yield Call(f"row {index} of 3", partial(ops.select_rows, memory.normal(3, 8), rows), False)


def token_masks(kernels: Kernels) -> Iterator[Call]:
    memory = kernels.memory

    def apply(vocab_size: int, rows: list[int], num_words: int) -> None:
        masks = torch.randint(-(2**31), 2**31, (len(rows), num_words)).int()
        masks[:, ::2] = 0
        cpu_apply_token_masks(
            kernels.library, memory.normal(3, vocab_size), memory.copy(torch.tensor(rows)), memory.copy(masks)
        )

    for size in SIZES:
        words = -(-size // 32)
        yield Call(f"masks of {size} tokens", partial(apply, size, [2, 0], words))
        yield Call(f"masks of {size} tokens, a word too few", partial(apply, size, [0], words - 1), False)
    yield Call("a mask of a row that does not exist", partial(apply, 33, [3], 2), False)


# -- ranks, and tapes --------------------------------------------------------------------------------------------------


def collectives(kernels: Kernels) -> Iterator[Call]:
    memory = kernels.memory

    def exchange(num_bytes: int, dtype: torch.dtype, size: int) -> None:
        """Two ranks, which are threads."""
        shared: Any = memory.zeros(num_bytes, dtype=torch.uint8).numpy()  # instead of a mapping: both are buffers
        inputs = [memory.normal(1, size, dtype=dtype) for _ in range(2)]

        def compute(rank: int) -> None:
            kernels.library.recording.recorder = CALLED
            group = SharedCollectives(kernels.library, shared, [os.pidfd_open(os.getpid())] * 2, [0, 1], rank, 60.0)
            group.all_reduce(memory.copy(inputs[rank]))
            group.all_gather(inputs[rank], dim=1)
            group.broadcast(memory.copy(inputs[rank]))
            barrier.wait()
            kernels.library.inflight_leave_group(group._pointer)

        barrier = threading.Barrier(2)
        other = threading.Thread(target=compute, args=(0,))
        other.start()
        compute(1)
        other.join()

    num_bytes: int = kernels.library.inflight_group_memory_bytes(2, PIECE_BYTES)
    for dtype in (FLOAT32, BFLOAT16, torch.float16):
        for size in (1, 7, 17, PIECE_BYTES // dtype.itemsize + 1):
            yield Call(f"collectives of {size} elements, {dtype}", partial(exchange, num_bytes, dtype, size))

    def lone(num_bytes: int) -> None:
        SharedCollectives(kernels.library, bytearray(num_bytes), [-1] * 2, [0, 1], 0, 1.0)  # type: ignore[arg-type]

    yield Call("memory of ranks that is too small", partial(lone, num_bytes - 1), False)


def tape(kernels: Kernels) -> Iterator[Call]:
    ops, memory = CpuLayerOps(kernels.library), kernels.memory

    def replay() -> None:
        weight, rows = memory.normal(24), memory.copy(torch.tensor([1, 0]))

        def compute(x: Tensor, rows: Tensor) -> list[Tensor]:
            return [ops.rms_norm(ops.select_rows(ops.rms_norm(x, weight, 1e-6), rows), weight, 1e-6)]

        x = memory.normal(3, 24)
        guarded = torch.empty
        vars(torch)["empty"] = TORCH_EMPTY  # a recorder sees torch's own allocations only
        with Recorder(kernels.library, [x], rows, [], [weight]) as recorder:
            results = compute(x, rows)
        kernels.library.recording.recorder = CALLED
        vars(torch)["empty"] = guarded
        made = recorder.finish(results)
        assert made is not None, recorder.refusal
        for num_tokens, chosen in ((1, [0]), (40, [39, 0, 3])):
            made.replay([memory.normal(num_tokens, 24)], memory.copy(torch.tensor(chosen)), [], run_tape)

    def run_tape(call: Callable[[], int]) -> None:
        assert call() == 0

    yield Call("a tape", replay)


def wrong(kernels: Kernels, side: Side) -> Iterator[Call]:
    """A call past the wrappers, which writes one element beside its buffer."""
    opened, first = kernels.library, 0 if side == "behind" else -1
    source, target = kernels.memory.empty(1026), kernels.memory.empty(1024)

    def copy() -> None:
        pointers = source.data_ptr() + 4, 0, 0, target.data_ptr() + 4 * first, 0, 0
        opened.inflight_copy_heads(*pointers, 1, 1, 1025 + first, DTYPES[FLOAT32])

    yield Call("one element too many", copy)


# -- the program -------------------------------------------------------------------------------------------------------


class Called:
    """The functions that were called, which the library tells it."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def add(self, name: str, arguments: Sequence[Any]) -> None:
        self.names.add(name)


CALLED = Called()


def run(job: str, opened: KernelLibrary, side: Side | None, made: Callable[[Kernels], Iterator[Call]]) -> None:
    memory = GuardedMemory(side)
    vars(torch)["empty"] = memory.empty  # the wrappers make their results with it
    opened.recording.recorder = CALLED
    for call in made(Kernels(opened, memory)):
        print(f"{job}: {side or 'sanitized'}: {call.name}", flush=True)
        try:
            call.run()
        except (ConfigError, AssertionError):
            if call.is_supported:
                raise
        else:
            assert call.is_supported, "it was not refused"


def call_all(name: str, job: str, is_sanitized: bool) -> None:
    opened = library.open_kernels(name)
    sides: tuple[Side | None, ...] = (None,) if is_sanitized else ("behind", "before")
    for side in sides:
        run(job, opened, side, calls)
    library.bind_threads(opened, [min(os.sched_getaffinity(0))])
    assert CALLED.names == SIGNATURES.keys(), f"never called: {SIGNATURES.keys() - CALLED.names}"


def call_wrongly(name: str, side: Side, job: str, is_sanitized: bool) -> None:
    run(job, library.open_kernels(name), None if is_sanitized else side, partial(wrong, side=side))


def in_a_process(work: Callable[[], None]) -> int:
    """Returns the exit code of a copy of this process that does the work; a negative one is a signal."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        faulthandler.enable()
        torch.manual_seed(0)
        torch.set_num_threads(1)
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--sanitized", type=Path)
    arguments = parser.parse_args()
    if arguments.sanitized is not None:
        library._FOLDER = arguments.sanitized
    jobs: dict[str, Callable[..., None]] = {}
    for name in arguments.names:
        jobs[name] = partial(call_all, name)
        jobs |= {f"{name} {side} a buffer": partial(call_wrongly, name, side) for side in ("behind", "before")}
    for job, work in jobs.items():
        code = in_a_process(partial(work, job=job, is_sanitized=arguments.sanitized is not None))
        print(f"{job}: exit code {code}", flush=True)


if __name__ == "__main__":
    main()
