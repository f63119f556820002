"""What the compiler makes of the attention kernels for GPUs, at the tiles they run with."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from inflight.kernels.triton import attention_decode, attention_mixed
from tests.conftest import FULL_GPU
from tests.support.triton_aot import MAX_SHARED_BYTES, KernelCase, resources

BLOCK_SIZE = 16
STRIDES = {"block_stride": "i32", "table_stride": "i32"}
TABLES = {"block_table": "*i32", "slots": "*i32", "seq_lens": "*i32"}


def case(
    module: str,
    kernel: str,
    arguments: dict[str, str],
    constants: dict[str, object],
    capability: int,
    warps: int,
    stages: int,
) -> KernelCase:
    """Pointers to numbers that are computed with, and strides, are multiples of 16, as where the kernels are launched."""
    tables = {*TABLES, "query_start_loc", "token_slots", "positions", "image_ends"}
    aligned = [n for n, kind in arguments.items() if n not in tables and (kind[0] == "*" or n.endswith("stride"))]
    return KernelCase(
        kernel=f"inflight.kernels.triton.{module}:{kernel}",
        signature={**arguments, **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        compute_capability=capability,
        num_warps=warps,
        num_stages=stages,
        aligned=aligned,
    )


def decode(capability: int, head_dim: int, per_head: int, cache: str = "*bf16", **more: Any) -> KernelCase:
    block_n, warps, stages = attention_decode.tile_of(head_dim, torch.bfloat16)
    arguments = {
        "query": "*bf16",
        "cache": cache,
        "output": "*bf16",
        **TABLES,
        "query_start_loc": "*i32",
        "sinks": "*fp32",
    }
    arguments |= {"partials": "*fp32", "partial_sums": "*fp32", "counters": "*i32", **STRIDES}
    constants = attention_decode.decode_constants(per_head, head_dim, BLOCK_SIZE, block_n)
    compiled = case(
        "attention_decode",
        "attention_decode_kernel",
        {**arguments, "usual_splits": "i32", "scale": "fp32"},
        {"WINDOW": 0, "SOFT_CAP": 0.0, "HAS_SINKS": False, "HAS_STARTS": False, **constants, **more},
        *(capability, warps, stages),
    )
    return dataclasses.replace(compiled, maxnreg=attention_decode.MAX_REGISTERS)


def mixed(capability: int, head_dim: int, per_head: int, cache: str = "*bf16", **more: Any) -> KernelCase:
    max_shared_bytes = MAX_SHARED_BYTES[capability]
    block_m, block_n, warps, stages = attention_mixed.tile_of(
        head_dim, torch.bfloat16, max_shared_bytes, has_float8_cache=cache == FLOAT8
    )
    arguments = {"query": "*bf16", "cache": cache, "output": "*bf16", **TABLES}
    arguments |= {"query_start_loc": "*i32", "sinks": "*fp32", "image_ends": "*i32", "num_rows": "i32", **STRIDES}
    usual = {"WINDOW": 0, "SOFT_CAP": 0.0, "HAS_SINKS": False, "IS_CAUSAL": True, "HAS_ENDS": False, "LEAST_QUERIES": 2}
    constants = attention_mixed.mixed_constants(2 * per_head, 2, head_dim, BLOCK_SIZE, block_m, block_n)
    return case(
        "attention_mixed",
        "attention_mixed_kernel",
        {**arguments, "scale": "fp32"},
        {**usual, **constants, **more},
        *(capability, warps, stages),
    )


def rotary_kv(capability: int, head_dim: int, cache: str) -> KernelCase:
    rows = dict.fromkeys(("heads", "weight", "cos", "sin", "query"), "*bf16")
    tables = {"block_table": "*i32", "token_slots": "*i32", "positions": "*i32"}
    arguments = {**rows, "cache": cache, **tables, "heads_stride": "i32", **STRIDES, "eps": "fp32"}
    constants = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": head_dim, "BLOCK_SIZE": BLOCK_SIZE}
    constants |= {"HAS_NORM": True, "HAS_ROTATION": True, "BLOCK_H": 8, "BLOCK_HALF": head_dim // 2}
    return case("rotary_kv", "rotary_kv_kernel", arguments, constants, capability, 4, 3)


WINDOW = {"WINDOW": 4096}
BENT = {**WINDOW, "SOFT_CAP": 50.0, "HAS_SINKS": True}
FLOAT8 = "*fp8e4nv"
# Of these and of the next ones a few are compiled in each run, and all if a kernel has changed (scripts/full_gpu_tests).
USUAL = [decode(90, 128, 16), mixed(90, 128, 4), rotary_kv(80, 64, "*bf16")]
if FULL_GPU:
    USUAL += [
        *(decode(80, 64, 16, **WINDOW), decode(89, 128, 4, FLOAT8)),
        *(mixed(80, 128, 4, **WINDOW), mixed(90, 64, 4), mixed(90, 64, 1, IS_CAUSAL=False, **WINDOW)),
        mixed(90, 256, 2, HAS_ENDS=True, **WINDOW),
        rotary_kv(89, 128, FLOAT8),
    ]
# For each tile the GPU that has the least shared memory for it, and of the kernels for it the one that needs most
# registers. sm_89 has the code of sm_86, but for float8. The tile of decode does not depend on the GPU.
MOST = [mixed(86, 256, 4, **BENT), mixed(90, 512, 4, **BENT), decode(86, 512, 4, **BENT)]
if FULL_GPU:
    MOST += [
        *(mixed(86, 128, 4), mixed(86, 512, 4), mixed(80, 512, 4, **BENT)),
        *(mixed(90, 512, 4, FLOAT8), mixed(89, 128, 4, FLOAT8)),
        *(decode(86, 128, 4, **BENT), decode(90, 512, 4, FLOAT8)),
    ]
# In float8 they need fewer registers and less shared memory.
RESIDENT_KINDS = [(head_dim, cache) for head_dim in (64, 128) for cache in ("*bf16", FLOAT8)[: 2 if FULL_GPU else 1]]
RESIDENT = [
    decode(90, head_dim, 4, cache, HAS_STARTS=has_starts)
    for head_dim, cache in RESIDENT_KINDS
    for has_starts in (False, True)
]


def every_shape() -> list[KernelCase]:
    head_dims = (64, 80, 96, 128, 160, 256, 512)
    shapes = [(*shape, 4) for shape in itertools.product(MAX_SHARED_BYTES, head_dims)]
    kinds: list[dict[str, Any]] = [{}, BENT, {"cache": FLOAT8}]
    return [
        kernel(*shape, **kind)
        for shape in shapes
        for kind in kinds
        for kernel in (mixed, decode)
        if shape[0] >= 89 or "cache" not in kind
    ]


@pytest.fixture(autouse=True, scope="module")
def _all_are_compiled_at_once() -> None:
    resources([*USUAL, *MOST, *RESIDENT])


def test_no_spills_within_shared_memory_on_tensor_cores() -> None:
    for of, found in zip(USUAL, resources(USUAL), strict=True):
        assert found.stack_bytes == 0, (of, found)
        assert found.shared_bytes <= MAX_SHARED_BYTES[of.compute_capability], (of, found)
        assert found.has_tensor_cores == ("rotary" not in of.kernel), (of, found)


@pytest.mark.parametrize(
    "cases", [pytest.param(lambda: MOST, id="most"), pytest.param(every_shape, id="all", marks=pytest.mark.full_gpu)]
)
def test_every_head_dimension_fits_the_shared_memory_of_every_gpu(cases: Callable[[], list[KernelCase]]) -> None:
    compiled = cases()
    for of, found in zip(compiled, resources(compiled), strict=True):
        assert found.shared_bytes <= MAX_SHARED_BYTES[of.compute_capability], (of, found)
        assert found.stack_bytes == 0, (of, found)


def test_programs_of_decode_are_resident_at_once() -> None:
    for of, found in zip(RESIDENT, resources(RESIDENT), strict=True):
        assert found.stack_bytes == 0, (of, found)
        assert attention_decode.PROGRAMS_PER_SM * 4 * 32 * found.registers <= 1 << 16, (of, found)
        assert attention_decode.PROGRAMS_PER_SM * (found.shared_bytes + 1024) <= 228 << 10, (of, found)
