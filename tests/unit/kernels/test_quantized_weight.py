"""Quantizing in plain torch against the C++ kernels, and against the weights themselves."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from inflight.kernels import quantized_weight
from inflight.kernels.cpu.library import open_kernels
from inflight.kernels.cpu.packing import quantize_rows as cpu_quantize_rows
from inflight.kernels.quantized_weight import (
    QuantizedWeight,
    concatenate_rows,
    fitting_group_size,
    quantize_rows,
    select_rows,
    split_groups,
)
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE


@pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="no C++ kernels here")
@hypothesis.given(
    name=st.sampled_from(INSTRUCTION_SETS_HERE),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    out_features=st.integers(1, 9),
    num_groups=st.integers(1, 4),
    group_size=st.sampled_from([32, 64, 128]),
    bits=st.sampled_from([4, 8]),
    skew=st.sampled_from([-3.0, 0.0, 0.5]),
    seed=st.integers(0, 2**31),
)
def test_the_same_integers_as_the_cpu_kernels(
    name: str,
    dtype: torch.dtype,
    out_features: int,
    num_groups: int,
    group_size: int,
    bits: int,
    skew: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(out_features, num_groups * group_size, generator=generator) + skew).to(dtype)
    ours = quantize_rows(weight, bits=bits, group_size=group_size)
    theirs = cpu_quantize_rows(open_kernels(name), [weight], bits=bits, group_size=group_size)
    # sums of squares in another order: of two ranges that are equally good the other may win
    same = torch.isclose(ours.scales, theirs.scales, rtol=1e-5)
    assert same.float().mean() > 0.9 or same.numel() - same.sum() <= 1
    assert same.all() or bits == 4
    if bits == 4:
        assert ours.offsets is not None and theirs.offsets is not None
        torch.testing.assert_close(ours.offsets[same], theirs.offsets[same], rtol=1e-5, atol=1e-6)
    step = (ours.values.int() - theirs.values.int()).abs().view(out_features, ours.scales.shape[1], -1)[same]
    assert step.max() <= 1, "ties"
    assert (step > 0).float().mean() < 0.01


@pytest.mark.parametrize(("bits", "group_size"), [(8, 96), (4, 32), (4, 96)])
def test_what_is_quantized_is_near_the_weight(bits: int, group_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_weight, "_AT_ONCE", 4 * 96)  # four rows at a time, and one left over
    weight = torch.randn(9, 96)
    weight[3] = 0
    held = quantize_rows(weight, bits=bits, group_size=group_size)
    assert held.group_size == group_size
    error = (held.dequantize() - weight).norm() / weight.norm()
    assert error < (0.01 if bits == 8 else 0.12)
    assert torch.equal(held.dequantize()[3], weight[3])


def with_offsets(out_features: int, in_features: int, *, bits: int, group_size: int) -> QuantizedWeight:
    shape = out_features, in_features // group_size
    values = torch.randint(0, 2**bits, (out_features, in_features), dtype=torch.uint8)
    return QuantizedWeight(values=values, scales=torch.rand(shape), offsets=torch.rand(shape), bits=bits)


def with_table(out_features: int, in_features: int, *, group_size: int, seed: int = 0) -> QuantizedWeight:
    table = torch.randint(-127, 128, (16,), generator=torch.Generator().manual_seed(seed)).tolist()
    values = torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8)
    scales = torch.rand(out_features, in_features // group_size)
    return QuantizedWeight(values=values, scales=scales, offsets=None, bits=4, table=tuple(table))


def symmetric(out_features: int, in_features: int) -> QuantizedWeight:
    return quantize_rows(torch.randn(out_features, in_features), bits=8, group_size=0)


def test_the_largest_half_of_a_group_that_divides_a_row() -> None:
    assert [fitting_group_size(size, 128) for size in (256, 192, 96, 32)] == [128, 64, 32, 32]
    assert [fitting_group_size(size, 128) for size in (112, 16)] == [None, None]
    assert fitting_group_size(96, 32) == 32


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 16)])
def test_a_weight_in_smaller_groups_is_the_same(bits: int, group_size: int) -> None:
    weight = with_offsets(3, 128, bits=bits, group_size=64)
    split = split_groups(weight, group_size)
    assert split.format == (bits, group_size, False)
    assert torch.equal(split.dequantize(), weight.dequantize())
    assert split_groups(weight, 64) is weight
    looked_up = with_table(3, 128, group_size=64)
    split = split_groups(looked_up, 32)
    assert split.format == (4, 32, False)
    assert torch.equal(split.dequantize(), looked_up.dequantize())
    whole = symmetric(2, 64)
    assert split_groups(whole, 32) is whole


def test_weights_of_one_format_keep_it_when_they_are_joined() -> None:
    for parts in (
        [with_offsets(2, 64, bits=4, group_size=32), with_offsets(3, 64, bits=4, group_size=32)],
        [symmetric(2, 40), symmetric(3, 40)],
        [with_table(2, 64, group_size=32), with_table(3, 64, group_size=32)],
    ):
        joined = concatenate_rows(parts)
        assert joined is not None and joined.format == parts[0].format
        assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_weights_of_several_formats_are_joined_in_eight_bits() -> None:
    parts = [with_offsets(2, 96, bits=4, group_size=96), with_offsets(3, 96, bits=8, group_size=48), symmetric(2, 96)]
    joined = concatenate_rows(parts)
    assert joined is not None and joined.format == (8, 48, False)
    torch.testing.assert_close(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert concatenate_rows([symmetric(2, 40), with_offsets(2, 160, bits=4, group_size=32)]) is None  # gcd(40, 32) is 8


def test_weights_of_several_tables_are_joined_in_eight_bits() -> None:
    one = with_table(2, 64, group_size=32)
    for other in (
        with_table(3, 64, group_size=32, seed=1),
        with_offsets(3, 64, bits=4, group_size=32),
        symmetric(3, 64),
    ):
        joined = concatenate_rows([one, other])
        assert joined is not None and joined.format == (8, 32, False) and not joined.table
        torch.testing.assert_close(joined.dequantize(), torch.cat([one.dequantize(), other.dequantize()]))


def test_a_table_by_its_definition() -> None:
    weight = with_table(3, 64, group_size=32)
    for row in range(3):
        for column in range(64):
            integer = weight.table[int(weight.values[row, column])]
            assert weight.dequantize()[row, column] == weight.scales[row, column // 32] * integer
    assert weight.without_table().format == (8, 32, False)
    plain = with_offsets(3, 64, bits=4, group_size=32)
    assert plain.without_table() is plain


def test_rows_are_selected_in_the_given_order() -> None:
    rows = torch.tensor([2, 0, 2])
    plain = torch.randn(3, 4)
    looked_up = with_table(3, 64, group_size=32)
    for weight in (plain, with_offsets(3, 64, bits=4, group_size=32), symmetric(3, 64), looked_up):
        chosen = select_rows(weight, rows)
        if isinstance(weight, QuantizedWeight):
            assert isinstance(chosen, QuantizedWeight) and chosen.format == weight.format
            assert torch.equal(chosen.dequantize(), weight.dequantize()[rows])
        else:
            assert isinstance(chosen, torch.Tensor) and torch.equal(chosen, weight[rows])
