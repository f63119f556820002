"""The C++ kernels between matrix products against the float64 reference, for every instruction set that is here."""

from __future__ import annotations

import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from inflight.config.architecture import GELU_TANH, SIGMOID, SILU
from inflight.kernels.cpu.layer_ops import CpuLayerOps
from inflight.kernels.cpu.library import open_kernels
from inflight.kernels.gate import ACTIVATIONS
from inflight.kernels.layer_ops import LayerOps, TorchLayerOps
from tests.support import kernel_reference as reference
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
# rounded once at the end: half a unit in the last place; plain torch rounds two or three times
KERNEL_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
TORCH_TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-6}


@pytest.fixture(params=["torch", *INSTRUCTION_SETS_HERE])
def ops(request: pytest.FixtureRequest) -> LayerOps:
    return TorchLayerOps() if request.param == "torch" else CpuLayerOps(open_kernels(request.param))


def tolerance(ops: LayerOps, dtype: torch.dtype) -> float:
    return (TORCH_TOLERANCE if isinstance(ops, TorchLayerOps) else KERNEL_TOLERANCE)[dtype]


def drawn(seed: int, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def strided(rows: Tensor, padding: int) -> Tensor:
    """The same rows, `padding` NaN elements behind each: nothing may read or write there."""
    wide = torch.full((rows.shape[0], rows.shape[1] + padding), math.nan, dtype=rows.dtype)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


def assert_close(ours: Tensor, truth: Tensor, tolerance: float) -> None:
    """Relative to the larger of the value and its row's mean magnitude: a sum may cancel."""
    magnitude = torch.maximum(truth.abs(), truth.abs().mean(dim=-1, keepdim=True))
    assert ((ours.double() - truth).abs() <= tolerance * magnitude + 1e-30).all()


fixed = hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
SIZES, ROWS, SEEDS = st.integers(1, 150), st.integers(1, 9), st.integers(0, 2**31)
SCALES = st.sampled_from([1e-4, 1.0, 100.0])


@fixed
@hypothesis.given(dtype=DTYPES, rows=ROWS, size=SIZES, padding=st.integers(0, 9), scale=SCALES, seed=SEEDS)
def test_rms_norm(
    ops: LayerOps, dtype: torch.dtype, rows: int, size: int, padding: int, scale: float, seed: int
) -> None:
    x = strided(drawn(seed, rows, size, dtype=dtype, scale=scale), padding)
    weight = drawn(seed + 1, size, dtype=dtype)
    before = x.clone()
    truth, _ = reference.rms_norm(x.double(), weight.double(), 1e-5)
    out = ops.rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    assert torch.equal(x, before)
    assert_close(out, truth, tolerance(ops, dtype))


@fixed
@hypothesis.given(dtype=DTYPES, rows=ROWS, size=SIZES, padding=st.integers(0, 9), seed=SEEDS)
def test_add_and_rms_norm(ops: LayerOps, dtype: torch.dtype, rows: int, size: int, padding: int, seed: int) -> None:
    delta, residual = (strided(drawn(seed + i, rows, size, dtype=dtype), padding) for i in (0, 1))
    weight = drawn(seed + 2, size, dtype=dtype)
    total, delta_before = delta + residual, delta.clone()
    out = ops.add_and_rms_norm(delta, residual, weight, 1e-6)
    assert torch.equal(residual, total), "the residual is rounded to its dtype"
    assert torch.equal(delta, delta_before)
    assert_close(out, reference.rms_norm(total.double(), weight.double(), 1e-6)[0], tolerance(ops, dtype))


@fixed
@hypothesis.given(
    dtype=DTYPES,
    num_tokens=ROWS,
    num_heads=st.integers(1, 4),
    others=st.integers(0, 2),
    half=st.sampled_from([1, 5, 8, 12, 16, 20, 32, 64]),
    norm=st.booleans(),
    seed=SEEDS,
)
def test_norm_and_rotate(
    ops: LayerOps, dtype: torch.dtype, num_tokens: int, num_heads: int, others: int, half: int, norm: bool, seed: int
) -> None:
    fused = drawn(seed, num_tokens, num_heads + others, 2 * half, dtype=dtype)
    weight = drawn(seed + 1, num_heads, 2 * half, dtype=dtype) if norm else None
    angles = drawn(seed + 2, num_tokens, half, dtype=torch.float32, scale=9.0)
    cos, sin = angles.cos().repeat(1, 2).to(dtype), torch.cat((-angles.sin(), angles.sin()), dim=-1).to(dtype)
    heads, behind = fused[:, :num_heads], fused[:, num_heads:].clone()
    truth = heads.double()
    if weight is not None:
        truth, _ = reference.rms_norm(truth, weight.double(), 1e-6)
    swapped = truth.roll(half, dims=-1)
    truth = truth * cos.double()[:, None] + swapped * sin.double()[:, None]
    assert_close(ops.norm_and_rotate(heads, weight, 1e-6, cos, sin), truth, 3 * tolerance(ops, dtype))
    assert torch.equal(fused[:, num_heads:], behind), "values behind queries and keys are not rotated"


@fixed
@hypothesis.given(dtype=DTYPES, num_tokens=ROWS, num_heads=st.integers(1, 4), size=SIZES, seed=SEEDS)
def test_norm_heads(ops: LayerOps, dtype: torch.dtype, num_tokens: int, num_heads: int, size: int, seed: int) -> None:
    fused = drawn(seed, num_tokens, 2 + num_heads, size, dtype=dtype)
    weight, before = drawn(seed + 1, num_heads, size, dtype=dtype), fused[:, :2].clone()
    truth, _ = reference.rms_norm(fused[:, 2:].double(), weight.double(), 1e-6)
    ops.norm_heads(fused[:, 2:], weight, 1e-6)
    assert_close(fused[:, 2:], truth, 3 * tolerance(ops, dtype))
    assert torch.equal(fused[:, :2], before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_are_shared_among_threads(ops: LayerOps, dtype: torch.dtype) -> None:
    x, weight = drawn(0, 300, 257, dtype=dtype), drawn(1, 257, dtype=dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        many = ops.rms_norm(x, weight, 1e-6)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(many, torch.cat([ops.rms_norm(x[i : i + 1], weight, 1e-6) for i in range(300)]))


def test_infinities_and_nan_stay(ops: LayerOps) -> None:
    """A broken row shows; it is no row of numbers."""
    x = torch.tensor([[math.inf, 1.0], [math.nan, 1.0]], dtype=torch.bfloat16)
    assert not ops.rms_norm(x, torch.ones(2, dtype=torch.bfloat16), 1e-6)[:, 0].isfinite().any()


@fixed
@hypothesis.given(dtype=DTYPES, rows=ROWS, size=SIZES, padding=st.integers(0, 9), scale=SCALES, seed=SEEDS)
def test_multiply_activation(
    ops: LayerOps, dtype: torch.dtype, rows: int, size: int, padding: int, scale: float, seed: int
) -> None:
    gate = strided(drawn(seed + 1, rows, size, dtype=dtype, scale=scale), padding)
    for activation in (SILU, GELU_TANH, SIGMOID):
        function = ACTIVATIONS[activation]
        x = strided(drawn(seed, rows, size, dtype=dtype), padding)
        truth = x.double() * function(gate.double())
        ops.multiply_activation(x, gate, activation)
        assert_close(x, truth, 2 * tolerance(ops, dtype))


@fixed
@hypothesis.given(dtype=DTYPES, rows=ROWS, size=SIZES, padding=st.integers(0, 9), seed=SEEDS)
def test_add_and_scale(ops: LayerOps, dtype: torch.dtype, rows: int, size: int, padding: int, seed: int) -> None:
    delta = strided(drawn(seed + 1, rows, size, dtype=dtype), padding)
    factor, factors = torch.tensor([0.75]), torch.linspace(0.5, 2.0, rows)[:, None].contiguous()
    for added, scaled in ((delta, None), (None, factor), (delta, factor), (None, factors), (delta, factors)):
        x = strided(drawn(seed, rows, size, dtype=dtype), padding)
        truth = x.double() if added is None else x.double() + added.double()
        ops.add_and_scale(x, added, scaled)
        assert_close(x, truth if scaled is None else truth * scaled.double(), 2 * tolerance(ops, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_and_rows_are_copied_between_any_strides(ops: LayerOps, dtype: torch.dtype) -> None:
    x = torch.arange(5 * 4 * 6).to(dtype).view(5, 4, 6)
    out = torch.zeros(5, 3, 9, dtype=dtype)
    ops.copy_heads(x[:, 1:3, 2:], out[:, :2, 5:])
    assert torch.equal(out[:, :2, 5:], x[:, 1:3, 2:])
    assert not out[:, 2:].any() and not out[:, :, :5].any()
    rows = torch.tensor([4, 0, 4])
    wide = x.flatten(1)[:, :7]
    chosen = ops.select_rows(wide, rows)
    assert torch.equal(chosen, wide[rows]) and chosen.is_contiguous()
    assert chosen.data_ptr() != wide.data_ptr()


def test_dimensions_that_are_not_rotated_are_not_scaled_either(ops: LayerOps) -> None:
    positions, frequencies = torch.tensor([0, 3]), torch.tensor([0.5, 0.0, 0.5, 0.0])
    for scale in (1.0, 2.0):
        cos, sin = ops.cos_and_sin(positions, frequencies, scale, torch.float32)
        turn = [scale * math.cos(1.5), scale * math.sin(1.5)]
        torch.testing.assert_close(cos, torch.tensor([[scale, 1, scale, 1], [turn[0], 1, turn[0], 1]]))
        torch.testing.assert_close(sin, torch.tensor([[0.0] * 4, [-turn[1], 0, turn[1], 0]]))
    assert ops.cos_and_sin(positions, frequencies, 2.0, torch.bfloat16)[0].dtype == torch.bfloat16
