"""The Triton kernels of experts: in the interpreter against the plain formulas, and compiled for GPUs that are not here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.config.architecture import GELU_TANH, SILU, SWIGLU_OAI
from inflight.config.experts import MoeSpec, RouterSpec
from inflight.kernels.expert_choice import choose_experts, compute_experts
from inflight.kernels.gate import GATE_CODES
from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.kernels.triton import experts
from inflight.kernels.triton.experts import ExpertLayer, ExpertTile, ExpertWeights, expert_tile, multiply_sorted
from inflight.kernels.triton.weight_only import pack_integers
from inflight.layers.gpu_experts import stack_floats, stack_fp8, stack_integers
from tests.conftest import FULL_GPU
from tests.support.kernel_reference import multiply_gate
from tests.support.triton_aot import MAX_SHARED_BYTES, KernelCase, resources
from tests.support.triton_inputs import DEVICE, drawn

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered")  # numpy's, in the interpreter
HIDDEN_SIZE, SIZE = 96, 64
Stacked = tuple[ExpertWeights, list[Tensor]]  # and each expert's weight as floats


def stacked(kind: str, num_experts: int, out_features: int, in_features: int, seed: int, *, has_bias: bool) -> Stacked:
    """`kind`: floats, fp8, or integers of so many bits, "s" if they are symmetric, "m" if half of the experts are."""
    weights = [drawn(seed + i, out_features, in_features, scale=0.2) for i in range(num_experts)]
    if kind == "floats":
        found = stack_floats(weights)
    elif kind == "fp8":
        narrow = [weight.to(torch.float8_e4m3fn) for weight in weights]
        scales = [drawn(seed + 50 + i, out_features, 1).abs() for i in range(num_experts)]
        found = stack_fp8(narrow, scales)
        weights = [weight.float() * scale for weight, scale in zip(narrow, scales, strict=True)]
    else:
        integers = [integer_weight(kind, out_features, in_features, seed + i) for i in range(num_experts)]
        found = stack_integers([pack_integers(each, dtype=torch.float32) for each in integers])
        assert (found.offsets is None) == kind.endswith("s")
        weights = [each.dequantize() for each in integers]
    assert (found.out_features, found.in_features) == (out_features, in_features)
    bias = drawn(seed + 99, num_experts, out_features) if has_bias else None
    return replace(found, bias=bias), weights


def integer_weight(kind: str, out_features: int, in_features: int, seed: int) -> QuantizedWeight:
    bits, generator = int(kind[0]), torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2**bits, (out_features, in_features), generator=generator, dtype=torch.uint8)
    scales = torch.rand(out_features, in_features // 32, generator=generator) * 2.0**-bits
    offsets = scales * 2 ** (bits - 1)
    if (kind.endswith("m") and seed % 2) or kind in ("4", "8"):
        offsets = offsets + 0.02
    return QuantizedWeight(values=values, scales=scales, offsets=offsets, bits=bits).to(DEVICE)


@pytest.mark.parametrize(
    ("kind", "gate", "num_experts", "num_tokens"),
    [
        ("floats", SILU, 5, 1),
        ("floats", SWIGLU_OAI, 9, 150),  # more than 16 pairs for an expert
        ("floats", GELU_TANH, 130, 7),  # most experts have no token
        ("fp8", SILU, 4, 9),
        ("4", SWIGLU_OAI, 4, 9),
        ("4s", SILU, 4, 5),
        ("4m", SILU, 4, 5),
        ("8", SILU, 4, 5),
        ("8s", SILU, 4, 90),
        ("8m", SILU, 4, 5),
    ],
)
@pytest.mark.parametrize("has_shared", [False, True])
def test_results_are_those_of_the_formula(
    kind: str, gate: str, num_experts: int, num_tokens: int, has_shared: bool
) -> None:
    has_bias = gate == SWIGLU_OAI
    spec = MoeSpec(
        num_experts=num_experts,
        size=SIZE,
        router=RouterSpec(top_k=3, renormalizes=True),
        activation=gate,
        bias=has_bias,
        shared_size=HIDDEN_SIZE * has_shared,
        has_shared_gate=has_shared,
    )
    gate_up, ups = stacked(kind, num_experts, 2 * SIZE, HIDDEN_SIZE, 1, has_bias=has_bias)
    down, downs = stacked(kind, num_experts, HIDDEN_SIZE, SIZE, 2, has_bias=has_bias)
    of_shared = drawn(3, HIDDEN_SIZE, HIDDEN_SIZE)

    def shared(rows: Tensor) -> Tensor:
        return rows @ of_shared

    def compute(index: int, rows: Tensor) -> Tensor:
        if index == num_experts:
            return shared(rows)
        biases = (None, None) if gate_up.bias is None or down.bias is None else (gate_up.bias[index], down.bias[index])
        inner = multiply_gate(F.linear(rows, ups[index], biases[0]), gate)
        return F.linear(inner, downs[index], biases[1])

    hidden = drawn(5, num_tokens, HIDDEN_SIZE, scale=8 if has_bias else 1)
    choices = choose_experts(drawn(6, num_tokens, num_experts + has_shared), spec)
    layer = ExpertLayer(gate_up, down, gate, shared if has_shared else None)
    truth = compute_experts(hidden, choices, compute)
    torch.testing.assert_close(layer(hidden, choices), truth, rtol=1e-4, atol=1e-4 * float(truth.abs().max()))
    assert layer(hidden[:0], choices[:0]).shape == (0, HIDDEN_SIZE)


def test_pairs_are_sorted_by_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = torch.tensor([[2, 0], [2, 4], [0, 2], [4, 1], [2, 4]], dtype=torch.int32, device=DEVICE)
    choices = torch.stack((chosen, torch.zeros_like(chosen)), -1)
    starts, pairs = (torch.full((size,), -1, dtype=torch.int32, device=DEVICE) for size in (5, 10))
    experts.sort_pairs_kernel[(5,)](choices, starts, pairs, 10, 4, BLOCK=4)  # 4 is a shared expert
    assert starts.tolist() == [0, 2, 3, 7, 7]
    assert pairs.tolist() == [1, 4, 7, 0, 2, 5, 8, -1, -1, -1]


def test_nan_stays_in_its_row() -> None:
    gate_up, _ = stacked("floats", 4, 2 * SIZE, HIDDEN_SIZE, 1, has_bias=False)
    down, _ = stacked("floats", 4, HIDDEN_SIZE, SIZE, 2, has_bias=False)
    spec = MoeSpec(num_experts=4, size=SIZE, router=RouterSpec(top_k=2))
    hidden, logits = drawn(1, 6, HIDDEN_SIZE), drawn(2, 6, 4)
    for gate in (SILU, SWIGLU_OAI):
        layer = ExpertLayer(gate_up, down, gate, None)
        clean = layer(hidden, choose_experts(logits, spec))
        with_nan, wrong = hidden.clone(), logits.clone()
        with_nan[1, 3], wrong[4, 2] = torch.nan, torch.nan
        found = layer(with_nan, choose_experts(wrong, spec))
        assert found[1].isnan().all() and found[4].isnan().all()
        others = [0, 2, 3, 5]
        assert torch.equal(found[others], clean[others])


def test_any_tile_computes_the_same() -> None:
    weights, plain = stacked("floats", 3, 70, 50, 4, has_bias=False)
    chosen = torch.tensor([[1], [1], [0], [1]], dtype=torch.int32, device=DEVICE)
    choices = torch.stack((chosen, torch.ones_like(chosen, dtype=torch.float32).view(torch.int32)), -1)
    starts = torch.tensor([0, 1, 4, 4], dtype=torch.int32, device=DEVICE)
    pairs = torch.tensor([2, 0, 1, 3], dtype=torch.int32, device=DEVICE)
    x = drawn(1, 4, 50)  # in the order of the pairs
    out = torch.full((4, 70), torch.nan, device=DEVICE)
    tile = ExpertTile(block_m=2, block_n=16, block_k=16, num_warps=4, num_stages=2)
    multiply_sorted(x, weights, (choices, starts, pairs), out, 4, gate=None, tile=tile)
    for place, (pair, expert) in enumerate([(2, 0), (0, 1), (1, 1), (3, 1)]):
        torch.testing.assert_close(out[pair], plain[expert] @ x[place], rtol=1e-4, atol=1e-5)


def case(capability: int, num_pairs: int, kind: str, *, is_down: bool, gate: str | None, has_bias: bool) -> KernelCase:
    bits = int(kind) if kind in "48" else 0
    weights = ExpertWeights(
        values=torch.empty(128, 0), out_features=1536, in_features=2880, bits=bits, group_size=64 if bits else 0
    )
    element = "fp32" if kind == "float32" else "bf16"
    tile = expert_tile(num_pairs, weights, torch.float32 if kind == "float32" else torch.bfloat16)
    stored = {"4": "*u8", "8": "*i8", "fp8": "*fp8e4nv"}.get(kind, f"*{element}")
    scale = "*fp16" if bits else "*fp32"
    pointers = {"x": f"*{element}", "values": stored, "scales": scale, "offsets": scale, "factors": "*fp32"}
    pointers |= {"bias": f"*{element}", "choices": "*i32", "starts": "*i32", "pairs": "*i32"}
    pointers |= {"out": "*fp32" if is_down else f"*{element}"}
    sizes = ("per_row", "num_experts", "out_features", "in_features", "scale_stride", "x_stride", "out_stride")
    constants = {
        "IS_DOWN": is_down, "HAS_SCALES": kind == "fp8", "HAS_OFFSETS": kind == "4", "HAS_BIAS": has_bias,
        "GATE": GATE_CODES[gate], "BITS": bits, "EVEN_K": weights.in_features % tile.block_k == 0, "EXPERTS": 128,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
    }  # fmt: skip
    return KernelCase(
        kernel="inflight.kernels.triton.experts:experts_kernel",
        signature={**pointers, **dict.fromkeys(sizes, "i32"), **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        compute_capability=capability,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=[*pointers, "out_features", "in_features", "scale_stride", "x_stride", "out_stride"],
    )


def compiled_cases() -> list[KernelCase]:
    """Two of them in each run, and all if a kernel has changed (scripts/full_gpu_tests)."""
    few, many = 64, 128 * 64
    gated, down = {"is_down": False, "gate": SILU}, {"is_down": True, "gate": None}
    always = [
        case(80, many, "bfloat16", **down, has_bias=True),
        case(90, many, "4", is_down=False, gate=SWIGLU_OAI, has_bias=True),
    ]
    if not FULL_GPU:
        return always
    return [
        *always,
        case(90, few, "bfloat16", **gated, has_bias=False),
        case(80, few, "8", **down, has_bias=False),
        case(89, many, "fp8", **gated, has_bias=False),
        case(86, many, "float32", **gated, has_bias=False),
    ]


def other_kernels() -> list[KernelCase]:
    pointers = {"choices": "*i32", "starts": "*i32", "pairs": "*i32"}
    sort = KernelCase(
        kernel="inflight.kernels.triton.experts:sort_pairs_kernel",
        signature={**pointers, "num_pairs": "i32", "num_experts": "i32", "BLOCK": "constexpr"},
        constants={"BLOCK": 1024},
        compute_capability=80,
    )
    add = KernelCase(
        kernel="inflight.kernels.triton.experts:add_experts_kernel",
        signature={"results": "*fp32", "out": "*bf16", "per_row": "i32", "size": "i32", "BLOCK": "constexpr"},
        constants={"BLOCK": 1024},
        compute_capability=90,
    )
    return [sort, add]


def test_they_compile_for_gpus() -> None:
    products, others = compiled_cases(), other_kernels()
    found = resources([*products, *others])
    assert all(each.stack_bytes == 0 for each in found), found
    for case_of, each in zip(products, found, strict=False):
        assert each.shared_bytes <= MAX_SHARED_BYTES[case_of.compute_capability], (case_of, each)
        assert each.has_tensor_cores == (case_of.signature["x"] != "*fp32")
