"""LayerNorm and activations against float64, by torch and by the C++ kernels of every instruction set that is here."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from inflight.config.architecture import GELU, GELU_TANH, RELU, SILU
from inflight.kernels.cpu.layer_ops import CpuLayerOps
from inflight.kernels.encoder_ops import activate, layer_norm
from inflight.kernels.gate import ACTIVATIONS
from inflight.kernels.layer_ops import LayerOps
from tests.unit.kernels.cpu.test_layer_ops import (
    DTYPES,
    ROWS,
    SCALES,
    SEEDS,
    SIZES,
    drawn,
    fixed,
    ops,  # noqa: F401  # a fixture
    strided,
)

# of the largest number of a row, which is about 4: LayerNorm subtracts a mean
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-7}


@fixed
@hypothesis.given(
    dtype=DTYPES,
    rows=ROWS,
    size=SIZES,
    padding=st.integers(0, 9),
    mean=st.sampled_from([0.0, 3.0]),
    has_delta=st.booleans(),
    has_bias=st.booleans(),
    seed=SEEDS,
)
def test_layer_norm(
    ops: LayerOps,  # noqa: F811
    dtype: torch.dtype,
    rows: int,
    size: int,
    padding: int,
    mean: float,
    has_delta: bool,
    has_bias: bool,
    seed: int,
) -> None:
    x = strided(drawn(seed, rows, size, dtype=dtype) + mean, padding)
    delta = strided(drawn(seed + 1, rows, size, dtype=dtype), padding) if has_delta else None
    weight = drawn(seed + 2, size, dtype=dtype)
    bias = drawn(seed + 3, size, dtype=dtype) if has_bias else None
    total = x.clone() if delta is None else x + delta
    found = layer_norm(ops, delta, x, weight, bias, 1e-3)
    assert found.dtype == dtype
    assert torch.equal(x, total), "the sum is rounded to its dtype"
    wide = total.double()
    distances = wide - wide.mean(-1, keepdim=True)
    truth = distances / (distances.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    truth = truth if bias is None else truth + bias.double()
    # an error of the mean counts as much more as it is larger than the distances
    spread = 1 + float((wide.abs().amax(-1) / (distances.square().mean(-1) + 1e-3).sqrt()).max())
    largest = truth.abs().amax(-1, keepdim=True)
    assert ((found.double() - truth).abs() <= TOLERANCE[dtype] * largest + 2e-7 * spread * weight.abs().max()).all()


@fixed
@hypothesis.given(dtype=DTYPES, rows=ROWS, size=SIZES, padding=st.integers(0, 9), scale=SCALES, seed=SEEDS)
def test_activations(
    ops: LayerOps,  # noqa: F811
    dtype: torch.dtype,
    rows: int,
    size: int,
    padding: int,
    scale: float,
    seed: int,
) -> None:
    for activation in (SILU, GELU_TANH, GELU, RELU):
        x = strided(drawn(seed, rows, size, dtype=dtype, scale=scale), padding)
        before = x.double()
        activate(ops, x, activation)
        difference = (x.double() - ACTIVATIONS[activation](before)).abs()
        assert (difference <= {torch.float32: 3e-7, torch.bfloat16: 2**-7}[dtype] * before.abs()).all(), activation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_are_shared_among_threads(ops: LayerOps, dtype: torch.dtype) -> None:  # noqa: F811
    x, weight = drawn(0, 300, 257, dtype=dtype), drawn(1, 257, dtype=dtype)
    alone = torch.cat([layer_norm(ops, None, x[i : i + 1], weight, weight, 1e-6) for i in range(300)])
    activated = alone.clone()
    for row in activated.split(1):
        activate(ops, row, GELU)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        many = layer_norm(ops, None, x, weight, weight, 1e-6)
        assert torch.equal(many, alone)
        activate(ops, many, GELU)
    finally:
        torch.set_num_threads(before)
    if isinstance(ops, CpuLayerOps):
        assert torch.equal(many, activated)


def test_nan_stays(ops: LayerOps) -> None:  # noqa: F811
    x = torch.tensor([[torch.nan, 1.0]])
    assert layer_norm(ops, None, x, torch.ones(2), None, 1e-6).isnan().all()
    for activation in (SILU, GELU_TANH, GELU, RELU):
        broken = x.clone()
        activate(ops, broken, activation)
        assert broken[0, 0].isnan() and not broken[0, 1].isnan()
