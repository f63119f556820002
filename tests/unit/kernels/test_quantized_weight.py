"""Quantizing in plain torch against the C++ kernels, and against the weights themselves."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from inflight.kernels import quantized_weight
from inflight.kernels.cpu.library import open_kernels
from inflight.kernels.cpu.packing import quantize_rows as cpu_quantize_rows
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
    ours = quantized_weight.quantize_rows(weight, bits=bits, group_size=group_size)
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
    held = quantized_weight.quantize_rows(weight, bits=bits, group_size=group_size)
    assert held.group_size == group_size
    error = (held.dequantize() - weight).norm() / weight.norm()
    assert error < (0.01 if bits == 8 else 0.12)
    assert torch.equal(held.dequantize()[3], weight[3])
