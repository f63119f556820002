"""The C++ linear kernels against float64, for every instruction set that the processor has."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from inflight.config.architecture import GELU, GELU_TANH, RELU, SILU
from inflight.kernels.cpu.huge_pages import HugePages
from inflight.kernels.cpu.library import open_kernels
from inflight.kernels.cpu.linear import PackedLinear
from inflight.kernels.cpu.packing import pack_float, pack_integers, quantize_rows
from inflight.kernels.encoder_ops import end_with_activation
from inflight.kernels.gate import ACTIVATIONS, MLP_GATES
from inflight.kernels.quantized_weight import QuantizedWeight
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE
from tests.support.kernel_reference import multiply_gate

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="no C++ kernels here")
NAMES = st.sampled_from(INSTRUCTION_SETS_HERE)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
ROWS = st.one_of(st.integers(1, 30), st.sampled_from([64, 200]))
GATES = st.sampled_from([None, SILU, GELU_TANH])
SEEDS = st.integers(0, 2**31)
GROUPS = st.sampled_from([(4, 32), (4, 64), (4, 96), (8, 16), (8, 48), (8, 64), (8, 96)])  # bits and size
MOST_OUTLIERS = 32  # of a row
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
fixed = hypothesis.settings(max_examples=60, deadline=None)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spaced(x: Tensor, padding: int) -> Tensor:
    """The same rows further apart, with NaN between them."""
    wide = torch.full((x.shape[0], x.shape[1] + padding), torch.nan, dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def truth_of(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str | None) -> Tensor:
    out = x.double() @ weight.double().T
    if bias is not None:
        out = out + bias.double()
    return out if gate is None else multiply_gate(out, gate)


def outliers_of(x: Tensor, bits: int) -> Tensor:
    """Which numbers of each row the integer kernels keep as floats, as quantize_row.h says. Bool, like `x`."""
    size, magnitude = x.shape[1], x.float().abs()
    buckets = torch.zeros(len(x), 64)
    for start in range(0, max(size, 64), 64):
        features = torch.arange(start, start + 64)
        features = features % size if size < 64 else features[features < size]
        part = buckets[:, : len(features)]
        part.copy_(part.maximum(magnitude[:, features]))
    first, second, third, fourth = buckets.view(len(x), 4, 16).unbind(1)
    typical = first.maximum(second).minimum(third.maximum(fourth)).sort(1).values[:, 7:8]
    limit = typical * ((2.0 if bits == 4 else 1.2) + 13 / math.sqrt(size))
    threshold = torch.where(buckets > limit, 0, buckets).amax(1, keepdim=True)
    if size > MOST_OUTLIERS:
        threshold = threshold.maximum(magnitude.sort(1, descending=True).values[:, MOST_OUTLIERS:][:, :1])
    return magnitude > threshold


def quantized_rows(x: Tensor, bits: int) -> Tensor:
    """What the kernels make of activations: outliers as they are, and 127 steps to either side of zero, a scale a row, for the
    others. Float64."""
    outliers = outliers_of(x, bits)
    rest = torch.where(outliers, 0, x.float())
    largest = rest.abs().amax(1, keepdim=True)
    steps = torch.where(largest > 0, rest * (torch.full_like(largest, 127) / largest), 0)
    return torch.where(outliers, x.double(), steps.round().double() * (largest / 127).double())


@fixed
@hypothesis.given(
    name=NAMES,
    dtype=DTYPES,
    rows=ROWS,
    in_features=st.integers(1, 40).map(lambda n: 4 * n),
    out_features=st.integers(1, 90),
    has_bias=st.booleans(),
    gate=GATES,
    padding=st.sampled_from([0, 2, 6]),
    seed=SEEDS,
)
def test_floats(
    name: str,
    dtype: torch.dtype,
    rows: int,
    in_features: int,
    out_features: int,
    has_bias: bool,
    gate: str | None,
    padding: int,
    seed: int,
) -> None:
    out_features *= 1 if gate is None else 2
    x = spaced(draw(seed, rows, in_features).to(dtype), padding)
    weight, bias = draw(seed + 1, out_features, in_features).to(dtype), draw(seed + 2, out_features).to(dtype)
    given = bias if has_bias else None
    first = seed % out_features
    parts = [weight] if first == 0 else [spaced(weight[:first], padding), weight[first:]]
    layer = pack_float(open_kernels(name), HugePages(), parts, given, gate=gate)
    truth = truth_of(x, weight, given, gate)
    for out_dtype in (torch.float32, dtype):
        out = layer(x, out_dtype)
        assert out.dtype == out_dtype and out.shape == truth.shape
        limit = truth.abs().max().item() * max(ROUNDING[out_dtype], 1e-5)
        assert (out.double() - truth).abs().max() <= limit


def integers(
    bits: int, group_size: int, num_groups: int, out_features: int, zero_point: str, seed: int
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    shape = out_features, num_groups * group_size
    scales = torch.rand(out_features, num_groups, generator=generator) * 0.1 + 0.001
    scales = scales.half().float()  # what the kernel holds
    if zero_point == "table":
        table = tuple(torch.randint(-127, 128, (16,), generator=generator).tolist())
        values = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
        return QuantizedWeight(values=values, scales=scales, offsets=None, bits=4, table=table)
    if zero_point == "none":
        values = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
        return QuantizedWeight(values=values, scales=scales[:, :1], offsets=None, bits=8)
    bits_used = bits - 2 if zero_point == "low" else bits  # "low": as in Q6_K, the values can be moved to the middle
    values = torch.randint(0, 2**bits_used, shape, generator=generator, dtype=torch.uint8)
    points = torch.randint(0, 2**bits, scales.shape).float() if zero_point == "any" else 2.0 ** (bits_used - 1)
    if zero_point == "beside":  # one step beside the middle, so the largest or the smallest value cannot be moved
        points += 1 if seed % 2 else -1
    return QuantizedWeight(values=values, scales=scales, offsets=scales * points, bits=bits)


def as_table_needs(groups: tuple[int, int], zero_point: str) -> tuple[int, int]:
    """Bits and group size; if there is a table, 4 bits and a multiple of 32."""
    return (4, -(-groups[1] // 32) * 32) if zero_point == "table" else groups


@fixed
@hypothesis.given(
    name=NAMES,
    dtype=DTYPES,
    rows=ROWS,
    groups=GROUPS,
    num_groups=st.integers(1, 5),
    out_features=st.integers(1, 90),
    zero_point=st.sampled_from(["none", "middle", "beside", "any", "table"]),
    gate=GATES,
    has_bias=st.booleans(),
    seed=SEEDS,
)
def test_integers(
    name: str,
    dtype: torch.dtype,
    rows: int,
    groups: tuple[int, int],
    num_groups: int,
    out_features: int,
    zero_point: str,
    gate: str | None,
    has_bias: bool,
    seed: int,
) -> None:
    out_features *= 1 if gate is None else 2
    groups = as_table_needs(groups, zero_point)
    weight = integers(*groups, num_groups, out_features, zero_point, seed)
    x = spaced(draw(seed, rows, weight.shape[1]).to(dtype), 4)
    bias = draw(seed + 2, out_features) if has_bias else None
    layer = packed(name, weight, bias, gate)
    truth = truth_of(quantized_rows(x, weight.bits), weight.dequantize().double(), bias, gate)
    out = layer(x, torch.float32)
    # offsets are held in half precision; at a tie the two may round an activation to different steps
    scale = (x.float().abs().amax(1, keepdim=True) * weight.dequantize().abs().sum(1).max()).double()
    limit = 2e-4 * scale + scale.amax() / 127 / weight.shape[1] * 2
    if gate is not None:
        limit = limit * (
            1 + truth_of(quantized_rows(x, weight.bits), weight.dequantize().double(), bias, None).abs().max()
        )
    assert ((out.double() - truth).abs() <= limit).all()


@fixed
@hypothesis.given(
    name=NAMES,
    dtype=DTYPES,
    rows=ROWS,
    groups=GROUPS,
    num_groups=st.integers(1, 9),
    zero_point=st.sampled_from(["none", "middle", "any", "table"]),
    num_channels=st.integers(1, 8),
    factor=st.sampled_from([10.0, 60.0, 1000.0, 1e6, 1e20]),
    seed=SEEDS,
)
def test_rows_with_outliers(
    name: str,
    dtype: torch.dtype,
    rows: int,
    groups: tuple[int, int],
    num_groups: int,
    zero_point: str,
    num_channels: int,
    factor: float,
    seed: int,
) -> None:
    """A few channels are far larger than the others: the others lose nothing. The last one and those at the ends of a group
    are among them. Each outlier is exact to a float, so the error of a sum is that of a float and the steps of the rest."""
    bits, group_size = as_table_needs(groups, zero_point)
    if zero_point == "none":  # a row is one group, which need not be whole vectors
        group_size += seed // 8 % 8 * 4
    weight = integers(bits, group_size, num_groups, 70, zero_point, seed)
    if weight.offsets is not None:  # what half precision holds, in which the kernel divides them by a power of two
        scales, points = (weight.scales + 0.1).half().float(), (weight.offsets / weight.scales).round()
        weight = replace(weight, scales=scales, offsets=(scales * points).half().float())
    size = weight.shape[1]
    x = draw(seed, rows, size)
    likely = torch.tensor([size - 1, 0, group_size - 1, group_size % size])
    others = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    channels = torch.cat([likely[seed % 4 :], others])[:num_channels]
    x[:, channels] *= factor
    x = spaced(x.to(dtype), 4)
    truth = truth_of(quantized_rows(x, weight.bits), weight.dequantize(), None, None)
    out = packed(name, weight)(x, torch.float32)
    # of rounded sums of floats; those of offsets, too
    offsets = 0 if weight.offsets is None else 2 * weight.offsets.abs().repeat_interleave(group_size, dim=1)
    weights = (weight.dequantize().abs() + offsets).double()
    limit = 1e-6 * (x.double().abs() @ weights.T)
    assert ((out.double() - truth).abs() <= limit).all()


def packed(name: str, weight: QuantizedWeight, bias: Tensor | None = None, gate: str | None = None) -> PackedLinear:
    return pack_integers(open_kernels(name), HugePages(), weight, bias, gate=gate)


@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
@pytest.mark.parametrize(("bits", "zero_point"), [(8, "none"), (8, "any"), (4, "middle"), (4, "any"), (4, "table")])
def test_outliers_at_the_limits(name: str, bits: int, zero_point: str) -> None:
    """Rows with nothing but outliers, with one tiny number, with zeros, with equal numbers, with an outlier behind the last
    whole vector of the row, and with more outliers than a list holds."""
    weight = integers(bits, 28 if zero_point == "none" else 32, 9, 70, zero_point, seed=1)
    size = weight.shape[1]
    ones = torch.ones(5, size)
    ones[0], ones[1], ones[2] = 0, 0, 0
    ones[1, 7], ones[2, size - 1], ones[3, size - 2], ones[4] = 3e4, 1e-35, -1e4, 1e30
    many = draw(1, 2, size)
    large = torch.arange(size) % 64 < 10  # 50 features
    many[:, large] *= 100
    many[1, large] = 77  # all are equal, so that none is larger than the 32 that follow
    x = torch.cat([ones, many])
    truth = truth_of(quantized_rows(x, weight.bits), weight.dequantize(), None, None)
    out = packed(name, weight)(x, torch.float32).double()
    limit = 1e-6 * (x.double().abs() @ weight.dequantize().abs().double().T)
    if weight.offsets is not None:  # they are held in half precision
        limit = limit * 2000
        limit = limit + 2e-3 * x.double().abs().sum(1, keepdim=True) * weight.offsets.abs().max()
    assert ((out - truth).abs() <= limit + 1e-33).all()
    assert torch.equal(out[0], torch.zeros(70))
    counts = outliers_of(x, weight.bits).sum(1).tolist()
    assert counts == [0, 1, 1, 1, 0, MOST_OUTLIERS, 0]


@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 16), (8, 32)])
@pytest.mark.parametrize("zero_point", ["none", "middle", "low", "any"])
def test_integer_sums_are_exact(name: str, bits: int, group_size: int, zero_point: str) -> None:
    """Rows that are their own integers: no rounding is left, and a wrong nibble, lane or zero point shows at once."""
    weight = integers(bits, group_size, 96 // group_size, 70, zero_point, seed=1)
    weight = QuantizedWeight(
        values=weight.values,
        scales=torch.ones_like(weight.scales),
        offsets=None if weight.offsets is None else (weight.offsets / weight.scales).round(),
        bits=weight.bits,
    )
    x = torch.randint(-127, 128, (33, weight.shape[1]), generator=torch.Generator().manual_seed(2)).float()
    x[:, 0] = 127  # so that a step is one
    layer = packed(name, weight)
    assert torch.equal(layer(x, torch.float32).double(), x.double() @ weight.dequantize().double().T)
    assert layer.weight.has_offsets == (zero_point == "any"), "one zero point for all groups costs no offsets"


@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
@pytest.mark.parametrize("group_size", [32, 64, 96])
@pytest.mark.parametrize("table", [[-127] * 16, [127] * 16, [-127, 127] * 8, list(range(-8, 8))], ids=str)
def test_sums_of_a_table_are_exact(name: str, group_size: int, table: list[int]) -> None:
    """Also where every product is as large as it can be: no sum of 16 bits may overflow."""
    drawn = integers(4, group_size, 192 // group_size, 70, "table", seed=1)
    weight = replace(drawn, scales=torch.ones_like(drawn.scales), table=tuple(table))
    x = torch.randint(-127, 128, (33, 192), generator=torch.Generator().manual_seed(2)).float()
    x[:, 0] = 127  # so that a step is one
    x[:2] = 127
    x[2] = -127
    out = packed(name, weight)(x, torch.float32).double()
    assert torch.equal(out, x.double() @ weight.dequantize().double().T)
    assert torch.equal(weight.without_table().dequantize(), weight.dequantize())


@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4", "table"])
def test_a_row_is_the_same_in_any_company(name: str, num_threads: int, kind: str) -> None:
    kernels, dtype = open_kernels(name), torch.float32 if kind == "float32" else torch.bfloat16
    weight, x = draw(0, 200, 1024).to(dtype), draw(1, 300, 1024).to(dtype)
    if kind.startswith("int"):
        bits = int(kind[3:])
        layer = packed(name, quantize_rows(kernels, [weight], bits=bits, group_size=64))
    elif kind == "table":
        layer = packed(name, integers(4, 32, 32, 200, "table", seed=3))
    else:
        layer = pack_float(kernels, HugePages(), [weight], None, gate=None)
    x[::3, [5, 77, 1023]] *= 50  # outliers, in some rows
    before = torch.get_num_threads()
    alone = torch.cat([layer(x[i : i + 1], torch.float32) for i in range(len(x))])
    torch.set_num_threads(num_threads)
    try:
        for size in (2, 7, 12, 13, 37, 299):
            start = 299 - size
            assert torch.equal(layer(x[start : start + size], torch.float32), alone[start : start + size]), size
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantizing_a_weight(name: str, dtype: torch.dtype) -> None:
    weight = draw(0, 37, 256).to(dtype) * 0.02
    weight[3] = 0
    kernels = open_kernels(name)
    eight = quantize_rows(kernels, [weight[:5], weight[5:]], bits=8, group_size=0)
    assert ((eight.dequantize() - weight.float()).abs() <= eight.scales * 0.5001).all()
    for group_size in (32, 64, 128):
        four = quantize_rows(kernels, [weight[:5], weight[5:]], bits=4, group_size=group_size)
        groups = weight.float().view(37, -1, group_size)
        span = groups.amax(2).clamp(min=0) - groups.amin(2).clamp(max=0)
        plain = ((span / 15) ** 2 / 12).sum()  # of the unshrunk range, values spread evenly over each step
        error = (four.dequantize() - weight.float()).view(groups.shape).square().mean(2).sum()
        assert 0 < error < 1.05 * plain
        assert (four.dequantize()[3] == 0).all()


@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
def test_rows_without_numbers(name: str) -> None:
    layer = pack_float(open_kernels(name), HugePages(), [draw(0, 8, 8)], None, gate=None)
    assert layer(torch.empty(0, 8), torch.float32).shape == (0, 8)
    assert layer(torch.full((1, 8), torch.nan), torch.float32).isnan().all()
    eight = packed(name, quantize_rows(open_kernels(name), [draw(0, 8, 8)], bits=8, group_size=0))
    assert torch.equal(eight(torch.zeros(2, 8), torch.float32), torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "size"), [(8, 64), (8, 68), (4, 96)])
@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
def test_a_row_with_a_number_that_is_not_finite_is_nan(name: str, bits: int, size: int, dtype: torch.dtype) -> None:
    """Of integer weights, whose rows are quantised. Its neighbours are as they were without it."""
    layer = packed(name, quantize_rows(open_kernels(name), [draw(0, 8, size)], bits=bits, group_size=32))
    x = draw(1, 15, size).to(dtype)
    truth = layer(x, torch.float32)
    for number, place in itertools.product((torch.inf, -torch.inf, torch.nan), (0, 33, size - 1)):
        broken = x.clone()
        broken[7, place] = number
        out = layer(broken, torch.float32)
        assert out[7].isnan().all(), (number, place)
        assert torch.equal(out[:7], truth[:7]) and torch.equal(out[8:], truth[8:]), (number, place)


@fixed
@hypothesis.given(
    name=NAMES,
    out_dtype=DTYPES,
    rows=ROWS,
    size=st.integers(1, 60).map(lambda n: 2 * n),
    scale=st.sampled_from([1e-4, 1.0, 100.0]),
    activation=st.sampled_from(MLP_GATES),
    seed=SEEDS,
)
def test_the_gate_alone(
    name: str, out_dtype: torch.dtype, rows: int, size: int, scale: float, activation: str, seed: int
) -> None:
    """The weight is the identity: what is left is activation(gate) * up."""
    x = draw(seed, rows, 2 * size) * scale
    before = x.clone()
    gate = pack_float(open_kernels(name), HugePages(), [torch.eye(2 * size)], None, gate=activation)
    out, truth = gate(x, out_dtype), multiply_gate(x.double(), activation)
    # Far below zero the gate is not 0 but some 1e-38 of its value. There exp(2z) has the error of z times |2z|, up to 40.
    limit = {torch.float32: 2e-6 if activation == SILU else 1e-5, torch.bfloat16: 2**-8}[out_dtype]
    assert ((out.double() - truth).abs() <= limit * truth.abs() + 1e-30).all()
    assert torch.equal(x, before)
    for column in (0, size):
        broken = x.clone()
        broken[0, column] = torch.nan
        assert gate(broken, torch.float32)[0, 0].isnan()


@fixed
@hypothesis.given(
    name=NAMES,
    out_dtype=DTYPES,
    rows=ROWS,
    out_features=st.integers(1, 90),
    bits=st.sampled_from([8, 16, 32]),
    activation=st.sampled_from([SILU, GELU_TANH, GELU, RELU]),
    seed=SEEDS,
)
def test_a_product_ends_with_an_activation(
    name: str, out_dtype: torch.dtype, rows: int, out_features: int, bits: int, activation: str, seed: int
) -> None:
    """It is computed before the results are rounded to their dtype."""
    dtype = torch.bfloat16 if bits == 16 else torch.float32
    x, weight, bias = (
        draw(seed, rows, 64).to(dtype),
        draw(seed + 1, out_features, 64).to(dtype),
        draw(seed + 2, out_features),
    )
    if bits == 8:
        layer = packed(name, quantize_rows(open_kernels(name), [weight], bits=8, group_size=64), bias)
    else:
        layer = pack_float(open_kernels(name), HugePages(), [weight], bias.to(dtype), gate=None)
    before = layer(x, torch.float32).double()
    assert end_with_activation(layer, activation)
    truth = ACTIVATIONS[activation](before)
    limit = {torch.float32: 3e-7, torch.bfloat16: 2**-8}[out_dtype]
    assert ((layer(x, out_dtype).double() - truth).abs() <= limit * before.abs() + 1e-30).all()


def test_a_product_by_torch_ends_without_the_activation() -> None:
    assert not end_with_activation(torch.nn.functional.linear, GELU)
