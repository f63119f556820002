"""The short convolution, in torch and in C++, against a sum in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight.kernels.cpu.library import open_kernels
from inflight.kernels.short_conv import CpuShortConv, short_conv
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE
from tests.unit.kernels.recurrent_case import Sequences, assert_close, check_drafts, drawn


def truth(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    b, c, x = rows.chunk(3, dim=-1)
    products = (b * x).double()  # rounded to the dtype of the rows
    seen = torch.cat([products.new_zeros(len(weight) - 1, products.shape[1]), products])
    total = sum(seen[k : k + len(rows)] * weight[k].double() for k in range(len(weight)))
    return c.double() * (total if bias is None else total + bias.double())


@pytest.mark.parametrize(("kernel_size", "has_bias"), [(2, True), (3, False), (8, True)])
def test_torch_in_pieces(kernel_size: int, has_bias: bool) -> None:
    rows, weight = drawn(5, 150, 60), drawn(6, kernel_size, 20)
    bias, inputs = drawn(7, 20) if has_bias else None, torch.zeros(kernel_size - 1, 20)
    pieces = []
    for piece in torch.split(rows, [1, 2, 1, 100, 46]):
        out, inputs = short_conv(piece, inputs, weight, bias)
        pieces.append(out)
    assert_close(torch.cat(pieces), truth(rows, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kernel_size", "channels", "has_bias"), [(2, 16, True), (3, 48, False), (8, 112, True)])
@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
def test_the_kernel_in_steps(name: str, kernel_size: int, channels: int, has_bias: bool, dtype: torch.dtype) -> None:
    weight, bias = drawn(6, kernel_size, channels), drawn(7, channels) if has_bias else None
    sequences = Sequences(
        CpuShortConv(open_kernels(name), weight, bias),
        lambda rows: truth(rows, weight, bias),
        width=3 * channels,
        offsets=[0, (kernel_size - 1) * channels * dtype.itemsize],
        dtype=dtype,
        num_sequences=3,
    )
    for counts in ((5, 1, 40), (1, 1, 1), (10, 33, 0), (1, 20, 1), (1, 1, 50), (70, 3, 2)):
        sequences.step(np.array(counts, dtype=np.int32), snapshots=[0, 2])
    sequences.check()


@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
def test_rejected_drafts_leave_nothing_in_the_state(name: str) -> None:
    weight, bias = drawn(6, 4, 32), drawn(7, 32)
    sequences = Sequences(
        CpuShortConv(open_kernels(name), weight, bias),
        lambda rows: truth(rows, weight, bias),
        width=96,
        offsets=[0, 3 * 32 * 4],
        dtype=torch.float32,
        num_sequences=3,
        num_states=4,
    )
    check_drafts(sequences)
