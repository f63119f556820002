"""A weight that is packed some rows at a time has the bytes of one that is packed at once, for every instruction set here."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch import Tensor

from inflight.config.architecture import SILU
from inflight.kernels import weight_rows
from inflight.kernels.cpu.huge_pages import HugePages
from inflight.kernels.cpu.library import open_kernels
from inflight.kernels.cpu.packing import pack_float, pack_integers, quantize_rows
from inflight.kernels.cpu.packing_rows import pack_rows
from inflight.kernels.quantized_weight import QuantizedWeight, concatenate_rows
from inflight.kernels.weight_rows import HeldRows, JoinedRows, WeightRows
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="no C++ kernels here")
SIZE = 96
ROWS = (330, 130)  # of two parts; 460 are no multiple of a panel, and 230 neither
EVERY = list(itertools.product(INSTRUCTION_SETS_HERE, (None, SILU)))


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows are read at once."""
    monkeypatch.setattr(weight_rows, "AT_ONCE", 64 * SIZE)


def floats(rows: int = sum(ROWS), dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(rows))
    return (values * torch.logspace(-6, 1, rows).unsqueeze(1)).to(dtype)  # the largest scale is in the last rows


def integers(bits: int, group_size: int, zero: int | None) -> QuantizedWeight:
    """`zero`: of all groups; None: each group has its own."""
    generator = torch.Generator().manual_seed(bits)
    shape = sum(ROWS), SIZE // group_size
    values = torch.randint(2**bits - 4, (shape[0], SIZE), generator=generator).to(torch.uint8)
    scales = torch.rand(shape, generator=generator) + 0.01
    zeros = torch.randint(2**bits, shape, generator=generator) if zero is None else torch.full(shape, zero)
    return QuantizedWeight(values=values, scales=scales, offsets=scales * zeros, bits=bits)


def in_parts(weight: Tensor | QuantizedWeight) -> WeightRows:
    whole = HeldRows(weight)
    parts = [whole.read(0, ROWS[0]), whole.read(ROWS[0], sum(ROWS))]
    return JoinedRows([HeldRows(part) for part in parts])


@pytest.mark.parametrize(("name", "gate"), EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floats(name: str, gate: str | None, dtype: torch.dtype) -> None:
    kernels, bias = open_kernels(name), torch.randn(sum(ROWS))
    whole = pack_float(kernels, HugePages(), [floats(dtype=dtype)], bias, gate=gate)
    found = pack_rows(kernels, HugePages(), in_parts(floats(dtype=dtype)), bias, gate=gate, quantize=None)
    assert found.packed.equal(whole.packed)
    assert found.bias is not None and whole.bias is not None and found.bias.equal(whole.bias)
    x = torch.randn(3, SIZE).to(dtype)
    assert found(x, torch.float32).equal(whole(x, torch.float32))


@pytest.mark.parametrize(("name", "gate"), EVERY)
@pytest.mark.parametrize("bits", [8, 4])
def test_floats_that_are_quantized(name: str, gate: str | None, bits: int) -> None:
    kernels = open_kernels(name)
    quantize = partial(quantize_rows, kernels, bits=bits, group_size=32)
    whole = pack_integers(kernels, HugePages(), quantize([floats()]), None, gate=gate)
    found = pack_rows(kernels, HugePages(), in_parts(floats()), None, gate=gate, quantize=quantize)
    assert found.packed.equal(whole.packed)
    assert (found.weight.scale, found.weight.out_features) == (whole.weight.scale, sum(ROWS))
    x = torch.randn(3, SIZE)
    assert found(x, torch.float32).equal(whole(x, torch.float32))


@pytest.mark.parametrize(("name", "gate"), EVERY)
@pytest.mark.parametrize("zero", [None, 8, 6])  # its own in each group, in the middle of 4 bits, beside it
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 16)])
def test_integers(name: str, gate: str | None, zero: int | None, bits: int, group_size: int) -> None:
    kernels, weight = open_kernels(name), integers(bits, group_size, zero)
    whole = pack_integers(kernels, HugePages(), weight, None, gate=gate)
    found = pack_rows(kernels, HugePages(), in_parts(weight), None, gate=gate, quantize=None)
    assert found.packed.equal(whole.packed) and found.weight.has_offsets == whole.weight.has_offsets


def test_a_table() -> None:
    kernels = open_kernels(INSTRUCTION_SETS_HERE[0])
    values = integers(4, 32, None)
    weight = QuantizedWeight(
        values=values.values, scales=values.scales, offsets=None, bits=4, table=tuple(range(-8, 8))
    )
    whole = pack_integers(kernels, HugePages(), weight, None, gate=None)
    found = pack_rows(kernels, HugePages(), in_parts(weight), None, gate=None, quantize=None)
    assert found.packed.equal(whole.packed) and found.weight.has_table


@pytest.mark.parametrize("name", INSTRUCTION_SETS_HERE)
@pytest.mark.parametrize(("first", "second"), [(8, None), (None, 8), (8, 7)])
def test_rows_with_other_zero_points(name: str, first: int | None, second: int | None) -> None:
    """Those of the first rows do not say which the others have."""
    kernels = open_kernels(name)
    one = HeldRows(integers(4, 32, first)).read(0, 64)
    other = HeldRows(integers(4, 32, second)).read(64, 128)
    parts = [each for each in (one, other) if isinstance(each, QuantizedWeight)]
    joined = concatenate_rows(parts)
    assert joined is not None
    found = pack_rows(kernels, HugePages(), HeldRows(joined), None, gate=None, quantize=None)
    assert bool(found.weight.has_offsets) == (first is None or second is None)
    x = torch.eye(SIZE)  # a single large number stays a float, so the results are the weights
    torch.testing.assert_close(found(x, torch.float32), joined.dequantize().T, rtol=0, atol=0.02)
