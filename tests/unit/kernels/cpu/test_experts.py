"""The C++ kernels of experts against float64, and against the same products one by one, for every instruction set here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inflight.config.architecture import GELU_TANH, SIGMOID, SILU, SWIGLU_OAI
from inflight.config.experts import HIGHEST, SOFTMAX, SPARSE_MIXER, TWO_HIGHEST, MoeSpec, RouterSpec
from inflight.kernels.cpu.experts import CpuExperts
from inflight.kernels.cpu.huge_pages import HugePages
from inflight.kernels.cpu.library import open_kernels
from inflight.kernels.cpu.linear import PackedLinear
from inflight.kernels.cpu.packing import pack_float, pack_integers, quantize_rows
from inflight.kernels.expert_choice import choose_experts, compute_experts
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE
from tests.support.kernel_reference import multiply_gate

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="no C++ kernels here")
HIDDEN_SIZE = 96
Product = tuple[Tensor, Tensor]  # weight and bias
BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4, "table": 4}


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Layer:
    """Experts with random weights: `kernel`, and the weights that it has after they were quantized, with their biases, in
    float64."""

    def __init__(self, name: str, spec: MoeSpec, dtype: torch.dtype, bits: int, *, has_table: bool = False) -> None:
        self.spec, self.dtype = spec, dtype
        kernels, memory = open_kernels(name), HugePages()
        sizes = [spec.size] * spec.num_experts + [spec.shared_size] * bool(spec.shared_size)

        def pack(weight: Tensor, gate: str | None) -> tuple[PackedLinear, Product]:
            weight, bias = weight.to(dtype), draw(len(weight), len(weight)).to(dtype) if spec.bias else None
            wide_bias = torch.zeros(()) if bias is None else bias.double()
            if bits > 8:
                return pack_float(kernels, memory, [weight], bias, gate=gate), (weight.double(), wide_bias)
            quantized = quantize_rows(kernels, [weight], bits=bits, group_size=32)
            if has_table:
                table = tuple(range(-120, 120, 15))  # a step of 15
                quantized = replace(quantized, scales=quantized.scales / 15, offsets=None, table=table)
            packed = pack_integers(kernels, memory, quantized, bias, gate=gate)
            return packed, (quantized.dequantize().double(), wide_bias)

        up = [pack(draw(i, 2 * size, HIDDEN_SIZE) * 0.2, spec.activation) for i, size in enumerate(sizes)]
        down = [pack(draw(99 + i, HIDDEN_SIZE, size) * 0.2, None) for i, size in enumerate(sizes)]
        self.up, self.down = [each for _, each in up], [each for _, each in down]
        self.packed_up, self.packed_down = [each for each, _ in up], [each for each, _ in down]
        self.bias = draw(7, spec.num_experts) * 0.3 if spec.router.has_choice_bias else None
        self.scale = draw(8, spec.num_experts) if spec.router.has_expert_scale else None
        self.kernel = CpuExperts(kernels, spec, self.packed_up, self.packed_down, dtype, self.bias, self.scale)

    def truth(self, hidden: Tensor, choices: Tensor) -> Tensor:
        chosen, weights = choices[..., 0], choices[..., 1].contiguous().view(torch.float32).double()
        out = torch.zeros(hidden.shape, dtype=torch.float64)
        for row, (experts, factors) in enumerate(zip(chosen.tolist(), weights, strict=True)):
            for expert, factor in zip(experts, factors, strict=True):
                (up, up_bias), (down, down_bias) = self.up[expert], self.down[expert]
                inner = multiply_gate(hidden[row : row + 1].double() @ up.T + up_bias, self.spec.activation)
                out[row] += factor * (inner @ down.T + down_bias)[0]
        return out

    def one_by_one(self) -> Callable[[int, Tensor], Tensor]:
        def compute(expert: int, rows: Tensor) -> Tensor:
            return self.packed_down[expert](self.packed_up[expert](rows, self.dtype), torch.float32)

        return compute

    def __call__(self, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        choices = self.kernel.choose(logits)
        return choices, self.kernel(hidden, choices)


def spec_of(num_experts: int = 7, top_k: int = 3, **fields: object) -> MoeSpec:
    given = {"size": 64, "router": RouterSpec(top_k=top_k), **fields}
    return MoeSpec(num_experts=num_experts, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(),
        spec_of(5, 5, router=RouterSpec(top_k=5, renormalizes=True)),
        spec_of(129, 8, router=RouterSpec(top_k=8, scoring=SIGMOID, renormalizes=True, scale=2.5)),
        spec_of(6, 1, shared_size=32),
        spec_of(16, 2, shared_size=32, has_shared_gate=True, router=RouterSpec(top_k=2, scoring=SOFTMAX)),
        spec_of(12, router=RouterSpec(top_k=4, num_groups=6, top_groups=2, group_scoring=HIGHEST, scale=16.0)),
        spec_of(12, router=RouterSpec(top_k=3, num_groups=12, top_groups=3, group_scoring=HIGHEST)),
        spec_of(9, router=RouterSpec(top_k=4, has_choice_bias=True, scoring=SIGMOID)),
        spec_of(9, router=RouterSpec(top_k=2, scoring=SPARSE_MIXER, jitter=0.2)),
        spec_of(9, router=RouterSpec(top_k=4, renormalizes=True, scale=1.5, has_expert_scale=True), shared_size=32),
        spec_of(9, router=RouterSpec(top_k=4, renormalizes=True, sum_offset=0.5, scoring=SIGMOID)),
        spec_of(
            32,
            router=RouterSpec(
                top_k=6,
                scoring=SIGMOID,
                has_choice_bias=True,
                num_groups=4,
                top_groups=2,
                group_scoring=TWO_HIGHEST,
                renormalizes=True,
            ),
        ),
    ],
)
@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
def test_choices_are_those_of_the_formula(name: str, spec: MoeSpec) -> None:
    layer = Layer(name, spec, torch.float32, 32)
    logits = draw(5, 70, spec.num_experts + spec.has_shared_gate) * 2
    logits[3, :5] = 1.5  # equal scores
    logits[4] = 0
    ours, truth = layer.kernel.choose(logits), choose_experts(logits, spec, layer.bias, layer.scale)
    assert torch.equal(ours[..., 0], truth[..., 0])
    weights, expected = (each[..., 1].contiguous().view(torch.float32) for each in (ours, truth))
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


GROUPED = RouterSpec(top_k=3, num_groups=7, top_groups=3, has_choice_bias=True, scoring=SIGMOID)


@pytest.mark.parametrize("router", [RouterSpec(top_k=3), GROUPED])
@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
def test_nan_stays_in_its_row(name: str, router: RouterSpec) -> None:
    layer = Layer(name, spec_of(router=router), torch.float32, 32)
    hidden, logits = draw(1, 20, HIDDEN_SIZE), draw(2, 20, 7)
    _, clean = layer(hidden, logits)
    logits[4, 2], hidden[9, 3], logits[11, 6], logits[12] = torch.nan, torch.nan, torch.inf, -torch.inf
    choices, found = layer(hidden, logits)
    assert ((choices[..., 0] >= 0) & (choices[..., 0] < 7)).all()
    spoilt = (4, 9, 11, 12)
    assert all(found[row].isnan().all() for row in spoilt)
    others = [row for row in range(20) if row not in spoilt]
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("activation", [SILU, GELU_TANH, SWIGLU_OAI])
@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
def test_results_are_those_of_float64(name: str, activation: str, kind: str) -> None:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    has_bias = activation == SWIGLU_OAI
    layer = Layer(
        name,
        spec_of(activation=activation, shared_size=96, bias=has_bias),
        dtype,
        BITS[kind],
        has_table=kind == "table",
    )
    for num_rows in (1, 2, 5, 40, 150) if activation == SILU else (1, 40):
        hidden = draw(num_rows, num_rows, HIDDEN_SIZE).to(dtype)
        choices, found = layer(hidden, draw(7, num_rows, 7))
        truth = layer.truth(hidden, choices)
        error = float((found.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt())
        assert error < {"float32": 1e-5, "bfloat16": 0.01, "int8": 0.02, "int4": 0.02, "table": 0.02}[kind]
        one_by_one = compute_experts(hidden, choices, layer.one_by_one()).to(dtype)
        torch.testing.assert_close(found, one_by_one, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-5)


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
def test_a_row_does_not_depend_on_the_others(name: str, num_threads: int, kind: str) -> None:
    """Also where the experts of a step are divided into batches."""
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    layer = Layer(name, spec_of(9, 4, size=128), dtype, BITS[kind], has_table=kind == "table")
    hidden, logits = draw(3, 1300, HIDDEN_SIZE).to(dtype), draw(4, 1300, 9)
    hidden[::50] *= 30
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        _, together = layer(hidden, logits)
        for rows in (slice(0, 1), slice(1, 3), slice(100, 149), slice(700, 1300)):
            assert torch.equal(layer(hidden[rows], logits[rows])[1], together[rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
def test_experts_that_do_not_exist_are_refused(name: str) -> None:
    layer = Layer(name, spec_of(), torch.float32, 32)
    choices = layer.kernel.choose(draw(1, 4, 7))
    choices[2, 1, 0] = 7
    with pytest.raises(AssertionError, match="experts must exist"):
        layer.kernel(draw(2, 4, HIDDEN_SIZE), choices)
