"""Calls of the kernels of matrix products: linear layers in all formats of weights, and experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from inflight.config.architecture import GELU_TANH, SILU
from inflight.config.experts import MoeSpec, RouterSpec
from inflight.kernels.cpu.experts import CpuExperts
from inflight.kernels.cpu.linear import PackedLinear
from inflight.kernels.cpu.packed_heads import PackedHeads
from inflight.kernels.cpu.packing import pack_float, pack_integers, quantize_rows
from inflight.kernels.quantized_weight import QuantizedWeight
from tests.unit.kernels.cpu.kernel_call import BFLOAT16, FLOAT32, FLOATS, FULL, SIZES, Call, Kernels

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
        yield experts_of(
            kernels, FLOAT32, 0, 16, 1020, 8, rows=[1, 40], has_choice_bias=True, has_expert_scale=True, **groups
        )


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
        scale = memory.normal(num_experts) if given.has_expert_scale else None
        packed = [[pack(gate) for _ in range(num_experts + 1)] for gate in (SILU, None)]
        layer = CpuExperts(kernels.library, spec, packed[0], packed[1], dtype, bias, scale)
        torch.set_num_threads(num_threads)
        for num_rows in rows:
            choices = layer.choose(memory.normal(num_rows, num_experts + 1))
            layer(memory.normal(num_rows, size, dtype=dtype), choices)
        torch.set_num_threads(1)

    name = f"{num_experts} experts of {size}, {bits} bits, {dtype}, {top_k} of them, {num_threads} threads"
    return Call(name, run, top_k <= num_experts <= 1024)
