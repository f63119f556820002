"""Kernels of the layers, compiled for GPUs that are not here: nothing spills, all fits, and products use tensor cores."""

from __future__ import annotations

from collections.abc import Mapping

from inflight.kernels.triton.layer_ops import BLOCK, LARGEST, num_warps
from inflight.kernels.triton.linear import FP8_TILES, TILES
from inflight.kernels.triton.weight_only import TILES as WEIGHT_ONLY_TILES
from tests.conftest import FULL_GPU
from tests.support.triton_aot import MAX_SHARED_BYTES, KernelCase, resources

ROWS = (16, 64) if FULL_GPU else (64,)  # of which most needs most
POINTERS = {
    "x": "*bf16",
    "residual": "*bf16",
    "weight": "*bf16",
    "bias": "*bf16",
    "out": "*bf16",
    "partials": "*fp32",
    "counters": "*i32",
    "scales": "*fp16",
    "offsets": "*fp16",
}
UNALIGNED = {
    "eps",
    "scale",
    "positions",
    "num_pairs",
    "factor",
    "num_rows",
    "num_groups",
    "first_feature",
    "num_features",
}


def case(
    kernel: str,
    arguments: str,
    constants: Mapping[str, object],
    *,
    capability: int = 90,
    num_warps: int = 4,
    num_stages: int = 3,
    pointers: Mapping[str, str] | None = None,
) -> KernelCase:
    """`arguments` that no pointer is named as are int32, or float32 where they are `eps` or `factor`."""
    types = {**POINTERS, **(pointers or {})}
    signature = {
        name: types.get(name, "fp32" if name in ("eps", "factor") else "i32") for name in arguments.split()
    } | dict.fromkeys(constants, "constexpr")
    return KernelCase(
        kernel=f"inflight.kernels.triton.{kernel}",
        signature=signature,
        constants=constants,
        compute_capability=capability,
        num_warps=num_warps,
        num_stages=num_stages,
        aligned=[name for name in arguments.split() if name not in UNALIGNED],
    )


def linear_case(
    tile: tuple[int, int, int, int], block_m: int, capability: int, *, is_fp8: bool = False, gate: int = 0
) -> KernelCase:
    block_n, block_k, warps, stages = tile
    return case(
        "linear:linear_kernel",
        "x weight scales bias out partials counters num_rows out_features in_features x_stride out_stride",
        {
            "HAS_SCALES": is_fp8,
            "HAS_BIAS": False,
            "GATE": gate,
            "EVEN_K": True,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
        },
        capability=capability,
        num_warps=warps,
        num_stages=stages,
        pointers={"scales": "*fp32", "weight": "*fp8e4nv" if is_fp8 else "*bf16"},
    )


def weight_only_case(
    tile: tuple[int, int, int], bits: int, group: int, block_m: int, capability: int, *, gate: int = 0
) -> KernelCase:
    block_n, warps, stages = tile
    return case(
        "weight_only:weight_only_kernel",
        "x values scales offsets bias out partials counters factor num_rows out_features num_groups scale_stride x_stride "
        "out_stride",
        {
            "BITS": bits,
            "GROUP": group,
            "HAS_OFFSETS": bits == 4,
            "HAS_BIAS": True,
            "GATE": gate,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
        },
        capability=capability,
        num_warps=warps,
        num_stages=stages,
        pointers={"values": "*u8" if bits == 4 else "*i8"},
    )


def product_cases(capability: int) -> list[KernelCase]:
    all_tiles = capability == 90 or (FULL_GPU and capability == 80)  # the others have half the shared memory
    all_gates = (0, 1, 2) if FULL_GPU else (2,)  # GELU needs most
    cases = [
        linear_case(tile, rows, capability, is_fp8=is_fp8, gate=gate)
        for is_fp8, tiles in ((False, TILES), (True, FP8_TILES))
        if capability >= 89 or not is_fp8
        for tile in tiles
        if all_tiles or tile[:2] == (64, 128)
        for rows in ROWS
        for gate in all_gates
    ]
    formats = [(4, 64)]
    if capability == 90:
        formats = [(4, 32), (4, 64), (4, 128), (8, 128)] if FULL_GPU else [(4, 64), (8, 128)]
    return cases + [
        weight_only_case(tile, bits, group, rows, capability, gate=gate)
        for tile in WEIGHT_ONLY_TILES
        for bits, group in formats
        for rows in ROWS
        for gate in all_gates
    ]


def test_products() -> None:
    capabilities = (80, 89, 90) if FULL_GPU else (90,)
    cases = [compiled for capability in capabilities for compiled in product_cases(capability)]
    for compiled, found in zip(cases, resources(cases), strict=True):
        told = (compiled.constants, found)
        assert found.stack_bytes == 0, told
        assert found.has_tensor_cores, told
        assert found.shared_bytes <= MAX_SHARED_BYTES[compiled.compute_capability], told


def test_everything_else() -> None:
    cases = [
        case(
            "layer_ops:rms_norm_kernel",
            "x residual weight out x_stride residual_stride size eps",
            {"HAS_RESIDUAL": has_residual, "BLOCK": block},
            num_warps=num_warps(block),
        )
        for block, has_residual in ((4096, True), (16384, False))
    ]
    cases.append(case("layer_ops:multiply_gate_kernel", "x out x_stride out_stride size", {"GATE": 2, "BLOCK": 1024}))
    cases.append(
        case(
            "layer_ops:quantize_rows_kernel",
            "x out scales x_stride size",
            {"LARGEST": LARGEST, "LEAST": 1e-12, "BLOCK": 4096},
            num_warps=num_warps(4096),
            pointers={"out": "*fp8e4nv", "scales": "*fp32"},
        )
    )
    cases.append(
        case(
            "weight_only:dequantize_kernel",
            "values scales offsets out factor first_feature num_features out_features scale_stride out_stride",
            {"BITS": 4, "GROUP": 64, "HAS_OFFSETS": True, "BLOCK_N": 32},
            pointers={"values": "*u8"},
        )
    )
    for compiled, found in zip(cases, resources(cases), strict=True):
        assert found.stack_bytes == 0 and found.registers <= 128, (compiled, found)


def test_sines_are_the_precise_ones() -> None:
    """They have a table and a stack to reduce large angles, which the instructions for approximate ones do without."""
    arguments = "positions frequencies cos sin scale num_pairs"
    pointers = {"positions": "*i32", "frequencies": "*fp32", "cos": "*bf16", "sin": "*bf16", "scale": "fp32"}
    compiled = case("layer_ops:cos_and_sin_kernel", arguments, {"HALF": 64, "BLOCK": BLOCK}, pointers=pointers)
    (found,) = resources([compiled])
    assert 0 < found.stack_bytes <= 64 and found.registers <= 32, found
