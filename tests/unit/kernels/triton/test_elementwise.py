"""Norms, the gate and fp8 rows: each kernel, in Triton's interpreter, against the reference in float64."""

from __future__ import annotations

import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from inflight.config.architecture import GELU, GELU_TANH, SILU
from inflight.kernels.layer_ops import TorchLayerOps
from inflight.kernels.triton.layer_ops import LARGEST, TritonLayerOps, multiply_gate, quantize_rows_fp8
from tests.support import kernel_reference as reference
from tests.support.triton_inputs import DEVICE, IS_INTERPRETED, ROUNDING, assert_close, drawn, padding_of, strided

OPS = TritonLayerOps()
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SIZES, ROWS, SEEDS = st.integers(1, 300), st.integers(0, 4), st.integers(0, 2**31)
few = hypothesis.settings(max_examples=40)


@few
@hypothesis.given(
    dtype=DTYPES,
    rows=ROWS,
    size=SIZES,
    padding=st.integers(0, 9),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    seed=SEEDS,
)
def test_rms_norm(dtype: torch.dtype, rows: int, size: int, padding: int, scale: float, seed: int) -> None:
    x = strided(drawn(seed, rows, size, dtype=dtype, scale=scale), padding)
    weight, before = drawn(seed + 1, size, dtype=dtype), x.clone()
    out = OPS.rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype and out.is_contiguous()
    assert torch.equal(x, before)
    assert_close(out, reference.rms_norm(x.double(), weight.double(), 1e-5)[0])


@few
@hypothesis.given(dtype=DTYPES, rows=ROWS, size=SIZES, padding=st.integers(0, 9), seed=SEEDS)
def test_add_and_rms_norm(dtype: torch.dtype, rows: int, size: int, padding: int, seed: int) -> None:
    delta, residual = (strided(drawn(seed + i, rows, size, dtype=dtype), padding) for i in (0, 1))
    weight, total, before = drawn(seed + 2, size, dtype=dtype), delta + residual, delta.clone()
    out = OPS.add_and_rms_norm(delta, residual, weight, 1e-6)
    if dtype == torch.bfloat16 and IS_INTERPRETED:
        torch.testing.assert_close(residual, total, rtol=2**-7, atol=0)
        total = residual.clone()
    assert torch.equal(residual, total), "the residual is rounded to its dtype"
    assert padding_of(residual).isnan().all()
    assert torch.equal(delta, before)
    assert_close(out, reference.rms_norm(total.double(), weight.double(), 1e-6)[0])


@pytest.mark.parametrize("size", [4096, 5120, 20000])
def test_norms_of_the_sizes_that_models_have(size: int) -> None:
    x, weight = drawn(0, 2, size, dtype=torch.bfloat16), drawn(1, size, dtype=torch.bfloat16)
    assert_close(OPS.rms_norm(x, weight, 1e-6), reference.rms_norm(x.double(), weight.double(), 1e-6)[0])


@pytest.mark.filterwarnings("ignore:.*encountered")  # numpy's, in the interpreter
def test_broken_rows_show() -> None:
    x = torch.tensor([[math.inf, 1.0], [math.nan, 1.0], [1.0, 1.0]], device=DEVICE)
    out = OPS.rms_norm(x, torch.ones(2, device=DEVICE), 1e-6)
    assert not out[:2, 0].isfinite().any()
    assert out[2].isfinite().all()


def test_heads_are_rotated_as_in_plain_torch() -> None:
    heads, weight = drawn(0, 3, 2, 8, dtype=torch.float32), drawn(1, 2, 8, dtype=torch.float32)
    cos, sin = drawn(2, 3, 8, dtype=torch.float32), drawn(3, 3, 8, dtype=torch.float32)
    plain = TorchLayerOps().norm_and_rotate(heads, weight, 1e-6, cos, sin)
    assert torch.equal(OPS.norm_and_rotate(heads, weight, 1e-6, cos, sin), plain)


@few
@hypothesis.given(
    dtype=DTYPES,
    positions=st.lists(st.one_of(st.integers(0, 200), st.integers(0, 1 << 20)), max_size=9),
    half=st.sampled_from([1, 10, 32, 64, 128]),
    scale=st.sampled_from([1.0, 1.25]),
)
def test_cos_and_sin(dtype: torch.dtype, positions: list[int], half: int, scale: float) -> None:
    tokens = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
    frequencies = 10000.0 ** -(torch.arange(half, device=DEVICE) / half).repeat(2)
    ours = OPS.cos_and_sin(tokens, frequencies, scale, dtype)
    angles = (tokens.float().unsqueeze(-1) * frequencies).double()  # of the float32 product, whatever it is
    sign = torch.ones(half, device=DEVICE)
    truth = angles.cos() * scale, angles.sin() * scale * torch.cat((-sign, sign))
    plain = TorchLayerOps().cos_and_sin(tokens, frequencies, scale, dtype)
    for one, exact, other in zip(ours, truth, plain, strict=True):
        assert one.dtype == other.dtype == dtype and one.is_contiguous()
        assert ((one.double() - exact).abs() <= ROUNDING[dtype] * exact.abs() + 1e-7).all()
        assert ((other.double() - exact).abs() <= ROUNDING[dtype] * exact.abs() + 1e-7).all()


def test_dimensions_that_are_not_rotated_are_not_scaled() -> None:
    tokens = torch.tensor([0, 7], dtype=torch.int32, device=DEVICE)
    frequencies = torch.tensor([1.0, 0.0] * 2, device=DEVICE)
    for ops in (OPS, TorchLayerOps()):
        cos, sin = ops.cos_and_sin(tokens, frequencies, 1.25, torch.float32)
        assert cos[:, 1::2].eq(1.0).all() and sin[:, 1::2].eq(0.0).all()
        torch.testing.assert_close(cos[:, 0], 1.25 * tokens.float().cos())
        torch.testing.assert_close(sin[:, 2], 1.25 * tokens.float().sin())


@few
@hypothesis.given(
    dtype=DTYPES,
    rows=ROWS,
    size=st.integers(1, 1500),
    padding=st.integers(0, 9),
    activation=st.sampled_from([SILU, GELU_TANH, GELU]),
    seed=SEEDS,
)
@pytest.mark.filterwarnings("ignore:.*encountered")  # numpy's, in the interpreter
def test_multiply_gate(dtype: torch.dtype, rows: int, size: int, padding: int, activation: str, seed: int) -> None:
    x = strided(drawn(seed, rows, 2 * size, dtype=dtype, scale=4), padding)
    out = strided(torch.zeros(rows, size, dtype=dtype, device=DEVICE), padding)
    multiply_gate(x, out, activation)
    assert_close(out, reference.multiply_gate(x.double(), activation))
    assert padding_of(out).isnan().all()


@pytest.mark.filterwarnings("ignore:.*encountered")  # numpy's, in the interpreter
@pytest.mark.parametrize("activation", [SILU, GELU_TANH, GELU])
def test_gates_far_from_zero(activation: str) -> None:
    out = torch.empty(1, 2, device=DEVICE)
    multiply_gate(torch.tensor([[-200.0, 200.0, 3.0, 3.0]], device=DEVICE), out, activation)
    assert out.tolist() == [[0.0, 600.0]]


@few
@hypothesis.given(
    dtype=DTYPES,
    rows=ROWS,
    size=SIZES,
    padding=st.integers(0, 9),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    seed=SEEDS,
)
def test_rows_of_fp8(dtype: torch.dtype, rows: int, size: int, padding: int, scale: float, seed: int) -> None:
    x = strided(drawn(seed, rows, size, dtype=dtype, scale=scale), padding)
    out, scales = quantize_rows_fp8(x)
    assert out.dtype == torch.float8_e4m3fn and scales.shape == (rows, 1)
    expected = x.float().abs().amax(dim=1, keepdim=True) / LARGEST
    torch.testing.assert_close(scales, expected, rtol=1e-6, atol=1e-12)
    truth = (x.float() / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    ours, truth = out.float(), truth.float()
    if IS_INTERPRETED:  # it rounds halves up, and up to a power of two it forgets the carry
        is_power = torch.frexp(truth)[0].abs() == 0.5
        ours = torch.where(is_power | ((ours - truth).abs() <= truth.abs() / 8 + 2**-6), truth, ours)
    assert torch.equal(ours, truth)


@pytest.mark.filterwarnings("ignore:.*encountered")  # numpy's, in the interpreter
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_row_of_fp8_with_a_number_that_is_not_finite_is_nan(number: float, place: int) -> None:
    x = torch.randn(3, 5, device=DEVICE)
    x[1, place] = number
    out, scales = quantize_rows_fp8(x)
    assert (out.float() * scales).isnan().all(dim=1).tolist() == [False, True, False]
    assert not (out.float() * scales)[::2].isnan().any()


def test_a_row_of_zeros_in_fp8() -> None:
    out, scales = quantize_rows_fp8(torch.zeros(1, 5, device=DEVICE))
    assert (out.float() == 0).all() and scales.isfinite().all() and (scales > 0).all()
