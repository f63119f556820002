"""`PlainLinear` and `KernelLinear`: weights in floats, quantized ones, and those that the kernels do not support."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from inflight.kernels.cpu.library import load_kernels
from inflight.kernels.quantized_weight import QuantizedWeight, quantize_rows
from inflight.layers.linear_method import KernelLinear, LinearMethod, PlainLinear


def kernel_linear(bits: int | None = None, group_size: int = 64) -> KernelLinear:
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("no C++ kernels here")
    return KernelLinear(kernels, torch.float32, bits=bits, group_size=group_size)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """The kernels round inputs to 8 bits. Weights of other bits or groups would be further away."""
    assert found.shape == wanted.shape and float((found - wanted).norm() / wanted.norm()) < 0.015


@pytest.mark.parametrize(
    ("bits", "group_size", "in_features", "wanted"),
    [
        (8, 64, 64, (8, 0)),  # a scale for each row, whatever the group size is
        (4, 64, 128, (4, 64)),
        (4, 64, 96, (4, 32)),  # no multiple of 64
        (4, 32, 64, (4, 32)),
        (4, 64, 48, (8, 0)),  # no multiple of 32
    ],
)
def test_floats_are_quantized(
    caplog: pytest.LogCaptureFixture, bits: int, group_size: int, in_features: int, wanted: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(5, in_features), torch.randn(3, in_features)]
    with caplog.at_level(logging.WARNING, "inflight"):
        multiply = kernel_linear(bits, group_size).prepare(parts, None)
    x = torch.randn(16, in_features)
    exact = quantize_rows(torch.cat(parts), bits=wanted[0], group_size=wanted[1]).dequantize()
    assert_near(multiply(x, torch.float32), x @ exact.T)
    assert [f"{in_features} input features" in record.getMessage() for record in caplog.records] == [True] * (
        wanted[0] != bits
    )


@pytest.mark.parametrize("in_features", [8, 6])  # the kernels take multiples of four
def test_floats_and_their_bias(in_features: int) -> None:
    parts, bias, x = (
        [torch.randn(5, in_features), torch.randn(3, in_features)],
        torch.randn(8),
        torch.randn(4, in_features),
    )
    wanted = x @ torch.cat(parts).T + bias
    for method in (kernel_linear(), PlainLinear(torch.float32)):
        multiply = method.prepare(parts, bias)
        torch.testing.assert_close(multiply(x, torch.float32), wanted, rtol=1e-4, atol=1e-4)
        out = torch.empty(4, 8)
        assert multiply(x, torch.float32, out) is out
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_features", [64, 38])  # the second one is not for the kernels
def test_a_weight_that_is_stored_quantized_stays_so(in_features: int) -> None:
    torch.manual_seed(0)
    values = torch.randint(-128, 128, (5, in_features), dtype=torch.int8)
    weight = QuantizedWeight(values=values, scales=torch.rand(5, 1), offsets=None, bits=8)
    x = torch.randn(16, in_features)
    for method in (kernel_linear(), kernel_linear(4), PlainLinear(torch.float32)):
        found = method.prepare(weight, None)(x, torch.float32)
        assert_near(found, x @ weight.dequantize().T)
    rounded = PlainLinear(torch.bfloat16).prepare(weight, None)(x.bfloat16(), torch.float32)
    assert rounded.dtype == torch.float32 and rounded.equal(rounded.bfloat16().float())


@pytest.mark.parametrize("in_features", [8, 6])
def test_a_weight_for_each_head(in_features: int) -> None:
    weights = torch.randn(3, 4, in_features)
    rows = torch.randn(5, 3, in_features + 2)[..., :in_features]  # with gaps
    wanted = torch.einsum("rhi,hoi->rho", rows, weights)
    for method in (kernel_linear(), PlainLinear(torch.float32)):
        out = torch.full((5, 3, 4), torch.nan)
        method.prepare_heads(weights)(rows, out)
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


def test_which_rows_do_not_depend_on_their_batch() -> None:
    assert not PlainLinear(torch.float32).is_batch_invariant(8)
    method = kernel_linear()
    assert [method.is_batch_invariant(size) for size in (4, 6, 8, 4096)] == [True, False, True, True]
    # sums of bytes must fit in 32 bits, whether the weights are quantized or not
    assert not method.is_batch_invariant(2**31 // (255 * 127) // 4 * 4 + 4)


def test_most_methods_have_one_way_to_multiply() -> None:
    methods: list[LinearMethod] = [kernel_linear(), PlainLinear(torch.float32)]
    assert [method.tune(64) for method in methods] == [[], []]
    assert [method.copies_weights for method in methods] == [True, False]
