"""Products with few rows, in Triton's interpreter, against float64: float weights, and weights of 4 and 8 bits."""

from __future__ import annotations

from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from inflight.config.architecture import GELU, GELU_TANH, SILU
from inflight.kernels.quantized_weight import QuantizedWeight, quantize_rows
from inflight.kernels.triton.linear import library_linear, linear, linear_configs, split_counts
from inflight.kernels.triton.split_k import SplitKScratch, TileConfig, block_m
from inflight.kernels.triton.weight_only import (
    PackedIntegers,
    can_pack,
    dequantize,
    pack_integers,
    weight_only_configs,
    weight_only_linear,
)
from tests.conftest import FULL_GPU
from tests.support.kernel_reference import multiply_gate
from tests.support.triton_inputs import DEVICE, assert_close, drawn, padding_of, strided

SMALL = TileConfig(block_n=32, block_k=32, num_splits=1, num_warps=4, num_stages=2)
GATES = st.sampled_from([None, SILU, GELU_TANH, GELU])
SPLITS, ROWS, SEEDS = st.integers(1, 5), st.integers(1, 20), st.integers(0, 2**31)
few = hypothesis.settings(max_examples=30 if FULL_GPU else 12)


def scratch_for(out_features: int, num_rows: int, config: TileConfig) -> SplitKScratch:
    """Just enough; what is uninitialised is no number."""
    scratch = SplitKScratch(DEVICE)
    scratch.reserve(out_features, num_rows, config)
    scratch.partials.fill_(torch.nan)
    return scratch


def output(num_rows: int, out_features: int, padding: int) -> Tensor:
    return strided(torch.full((num_rows, out_features), torch.nan, device=DEVICE), padding)


@few
@hypothesis.given(
    rows=ROWS,
    out_features=st.integers(1, 80),
    in_features=st.integers(1, 300),
    num_splits=SPLITS,
    has_bias=st.booleans(),
    gate=GATES,
    padding=st.integers(0, 5),
    seed=SEEDS,
)
@pytest.mark.filterwarnings("ignore:.*encountered")  # numpy's, in the interpreter
def test_linear(
    rows: int,
    out_features: int,
    in_features: int,
    num_splits: int,
    has_bias: bool,
    gate: str | None,
    padding: int,
    seed: int,
) -> None:
    config, columns = replace(SMALL, num_splits=num_splits), out_features
    out_features *= 1 if gate is None else 2
    weight, bias = drawn(seed, out_features, in_features), drawn(seed + 1, out_features) if has_bias else None
    scratch = scratch_for(out_features, rows, config)
    for call in range(2):
        x, out = strided(drawn(seed + 2 + call, rows, in_features), padding), output(rows, columns, padding)
        linear(x, weight, bias, out, config, scratch, gate=gate)
        truth = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        truth = truth if gate is None else multiply_gate(truth, gate)
        torch.testing.assert_close(
            out.double(), truth, rtol=1e-5, atol=1e-5 * in_features ** (0.5 if gate is None else 1.0)
        )
        assert padding_of(out).isnan().all()
        assert (scratch.counters == 0).all(), "the next product starts from zero"
        if gate is None:
            by_library = torch.empty_like(out)
            library_linear(x, weight, bias, by_library)
            torch.testing.assert_close(by_library, out, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*encountered")  # numpy's, in the interpreter
@pytest.mark.parametrize("gate", [None, SILU, GELU_TANH, GELU])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_weights_in_fp8(num_splits: int, gate: str | None) -> None:
    config = replace(SMALL, num_splits=num_splits)
    weight, scales, bias = drawn(0, 70, 200).to(torch.float8_e4m3fn), drawn(1, 70).abs(), drawn(2, 70)
    x, out = drawn(3, 5, 200), output(5, 70 if gate is None else 35, 3)
    linear(x, weight, bias, out, config, scratch_for(70, 5, config), scales=scales, gate=gate)
    truth = x.double() @ (weight.double() * scales.double()[:, None]).T + bias.double()
    truth = truth if gate is None else multiply_gate(truth, gate)
    torch.testing.assert_close(out.double(), truth, rtol=1e-4, atol=1e-4)
    assert padding_of(out).isnan().all()


def test_programs_share_only_rows_that_are_there() -> None:
    config = replace(SMALL, num_splits=2)
    scratch = scratch_for(32, 3, config)
    linear(drawn(0, 3, 64), drawn(1, 32, 64), None, output(3, 32, 0), config, scratch)
    partials = scratch.partials.view(2, 16, 32)
    assert partials[:, :3].isfinite().all() and partials[:, 3:].isnan().all()


def test_splits_are_added_in_their_own_order() -> None:
    """Whichever program is last, what it has in registers counts no more than what it reads."""
    config = replace(SMALL, num_splits=3)
    x = torch.ones(1, 96, device=DEVICE)
    weight = torch.zeros(1, 96, device=DEVICE)
    weight[0, [0, 32, 64]] = torch.tensor([1e8, -1e8, 1.0], device=DEVICE)
    out = torch.empty(1, 1, device=DEVICE)
    linear(x, weight, None, out, config, scratch_for(1, 1, config))
    assert out.item() == 1.0  # in another order the one is lost


def test_only_the_last_program_stores() -> None:
    config = replace(SMALL, num_splits=3)
    scratch, out = scratch_for(40, 2, config), output(2, 40, 0)
    scratch.counters.fill_(-9)  # none is the last
    linear(drawn(0, 2, 96), drawn(1, 40, 96), None, out, config, scratch)
    assert out.isnan().all()
    assert (scratch.counters == -9 + 3).all()


def test_scratch_grows_and_its_counters_stay_zero() -> None:
    scratch = SplitKScratch(DEVICE)
    for config, num_rows in ((SMALL, 64), (replace(SMALL, num_splits=3), 17), (replace(SMALL, num_splits=2), 1)):
        scratch.reserve(100, num_rows, config)
        assert scratch.counters.numel() >= (4 if config.num_splits > 1 else 1) and not scratch.counters.any()
    assert scratch.partials.numel() == 4 * 3 * 32 * 32
    assert [block_m(rows) for rows in (1, 16, 17, 33, 64)] == [16, 16, 32, 64, 64]


def test_what_is_measured() -> None:
    assert split_counts(64, 32, 132, (1, 2, 4)) == [2, 4, 8]
    assert split_counts(384, 32, 132, (1, 2)) == [1]
    assert split_counts(16, 8, 132, (1, 2)) == [4]  # two steps each
    assert split_counts(1, 1, 132, (1, 2)) == [1]
    for n, k in ((1024, 3072), (151936, 1024), (24576, 4096)):
        configs = linear_configs(n, k, 132)
        assert len(configs) == len(set(configs)) <= 15
        assert all(config.num_splits * 2 * config.block_k <= k for config in configs)


def quantized(kind: str, out_features: int, num_groups: int, group_size: int, seed: int) -> QuantizedWeight:
    """`kind`: int8 by rows; or groups of 4 or 8 bits, symmetric ("4s", "8s") or not."""
    generator = torch.Generator().manual_seed(seed)
    shape = (out_features, num_groups * group_size)
    if kind == "int8":
        return quantize_rows(torch.randn(shape, generator=generator), bits=8, group_size=0).to(torch.device(DEVICE))
    bits = int(kind[0])
    values = torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)
    scales = torch.rand(out_features, num_groups, generator=generator) * 1e-2
    offsets = scales * 2 ** (bits - 1)
    if not kind.endswith("s"):
        offsets = offsets + 1e-2 * torch.rand(offsets.shape, generator=generator)
    return QuantizedWeight(values=values.to(DEVICE), scales=scales.to(DEVICE), offsets=offsets.to(DEVICE), bits=bits)


def packed(weight: QuantizedWeight, dtype: torch.dtype) -> PackedIntegers:
    return pack_integers(weight, dtype=dtype)


KINDS = st.sampled_from(["int8", "4", "4s", "8", "8s"])


@few
@hypothesis.given(
    kind=KINDS,
    rows=ROWS,
    out_features=st.integers(1, 70),
    num_groups=st.integers(1, 5),
    group_size=st.sampled_from([32, 64, 96, 128, 256]),
    num_splits=SPLITS,
    has_bias=st.booleans(),
    gate=GATES,
    padding=st.integers(0, 5),
    seed=SEEDS,
)
@pytest.mark.filterwarnings("ignore:.*encountered")  # numpy's, in the interpreter
def test_weight_only(
    kind: str,
    rows: int,
    out_features: int,
    num_groups: int,
    group_size: int,
    num_splits: int,
    has_bias: bool,
    gate: str | None,
    padding: int,
    seed: int,
) -> None:
    columns = out_features
    out_features *= 1 if gate is None else 2
    stored = quantized(kind, out_features, num_groups, group_size, seed)
    weight, bias = packed(stored, torch.float32), drawn(seed + 1, out_features) if has_bias else None
    assert (weight.out_features, weight.in_features) == tuple(stored.shape)
    config = replace(SMALL, num_splits=num_splits)
    scratch = scratch_for(out_features, rows, config)
    truth_weight = stored.dequantize().double()
    for call in range(2):
        x = strided(drawn(seed + 2 + call, rows, weight.in_features), padding)
        out = output(rows, columns, padding)
        weight_only_linear(x, weight, bias, out, config, scratch, gate=gate)
        truth = x.double() @ truth_weight.T + (0 if bias is None else bias.double())
        truth = truth if gate is None else multiply_gate(truth, gate)
        torch.testing.assert_close(out.double(), truth, rtol=1e-4, atol=1e-4)
        assert padding_of(out).isnan().all()
        assert (scratch.counters == 0).all()


@few
@hypothesis.given(
    kind=KINDS,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    out_features=st.integers(1, 70),
    num_groups=st.integers(1, 3),
    group_size=st.sampled_from([32, 64, 192]),
    seed=SEEDS,
    data=st.data(),
)
def test_dequantize(
    kind: str, dtype: torch.dtype, out_features: int, num_groups: int, group_size: int, seed: int, data: st.DataObject
) -> None:
    stored = quantized(kind, out_features, num_groups, group_size, seed)
    weight = packed(stored, dtype)
    first = data.draw(st.integers(0, out_features - 1))
    num_features = data.draw(st.integers(1, out_features - first))
    out = torch.empty(num_features, weight.in_features, dtype=dtype, device=DEVICE)
    dequantize(weight, first, out)
    truth = stored.dequantize()[first : first + num_features].double()
    if dtype == torch.float32:
        assert_close(out, truth)
    else:  # scales in float16 move a weight by up to 2**-11 of the largest there is in its group
        torch.testing.assert_close(out.double(), truth, rtol=2**-6, atol=2**-10 * float(truth.abs().max()))


def test_scales_are_half_as_wide_and_symmetric_groups_have_no_offsets() -> None:
    for kind, has_offsets in (("4", True), ("4s", False), ("8", True), ("8s", False), ("int8", False)):
        stored = quantized(kind, 8, 2, 64, 0)
        weight = packed(stored, torch.bfloat16)
        assert (weight.offsets is not None) == has_offsets
        assert weight.scales.dtype == torch.float16 and weight.scales.abs().max() <= 1
        assert weight.values.numel() * 8 == stored.values.numel() * stored.bits
        assert weight.values.dtype == (torch.int8 if kind in ("8s", "int8") else torch.uint8)


@pytest.mark.parametrize(("in_features", "group_size", "fits"), [(96, 96, True), (100, 100, False), (192, 96, True)])
def test_which_weights_can_be_packed(in_features: int, group_size: int, fits: bool) -> None:
    assert can_pack(in_features, group_size) == fits


def test_what_is_measured_of_integers() -> None:
    weight = packed(quantized("4", 256, 16, 64, 0), torch.float16)
    configs = weight_only_configs(weight, 132)
    assert len(configs) == len(set(configs)) > 0
    assert {config.block_k for config in configs} == {64}


@pytest.mark.parametrize("kind", ["4", "4s", "8", "int8"])
def test_the_factor_that_scales_were_divided_by_comes_back(kind: str) -> None:
    stored = quantized(kind, 40, 2, 64, 0)
    weight = packed(stored, torch.float16)
    assert weight.factor != 1
    x, out = drawn(1, 2, 128, dtype=torch.float16), output(2, 40, 0)
    weight_only_linear(x, weight, None, out, SMALL, scratch_for(40, 2, SMALL))
    truth = x.double() @ stored.dequantize().double().T
    assert (out - truth).norm() < 2**-8 * truth.norm()
