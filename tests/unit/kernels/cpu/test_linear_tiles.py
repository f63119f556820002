"""Linear layers by the tiles of AMX: what only they could get wrong. The other tests of linear layers run with them, too."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from inflight.kernels.cpu.huge_pages import HugePages
from inflight.kernels.cpu.library import open_kernels
from inflight.kernels.cpu.linear import PackedLinear
from inflight.kernels.cpu.packing import pack_float, pack_integers
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE
from tests.support.integer_weights import INTEGER_WEIGHTS, integer_weight

AMX = "avx512_amx"
pytestmark = pytest.mark.skipif(AMX not in INSTRUCTION_SETS_HERE, reason=f"no {AMX} here: {INSTRUCTION_SETS_HERE}")
BLOCK_EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 130]  # rows; a block has at most 32, a tile 16


def whole_numbers(seed: int, *shape: int) -> Tensor:
    """From -8 to 8, in bfloat16. Sums of their products are exact in float32."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def layer_of(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    return pack_float(open_kernels(AMX), HugePages(), [weight], bias, gate=None)


@pytest.mark.parametrize("in_features", [4, 28, 32, 36, 64, 100, 352])
@pytest.mark.parametrize("out_features", [1, 15, 33, 80])
def test_each_product_is_added_once(in_features: int, out_features: int) -> None:
    """With numbers of features that do and do not fill a tile."""
    weight = whole_numbers(1, out_features, in_features)
    bias = whole_numbers(2, out_features)
    layer = layer_of(weight, bias)
    for num_rows in BLOCK_EDGES:
        x = whole_numbers(num_rows, num_rows, in_features)
        truth = x.double() @ weight.double().T + bias.double()
        assert torch.equal(layer(x, torch.float32).double(), truth), num_rows


@pytest.mark.parametrize("in_features", [64, 100, 1024])
def test_a_row_is_the_same_in_every_block(in_features: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(130, in_features, generator=generator).bfloat16()
    layer = layer_of(torch.randn(96, in_features, generator=generator).bfloat16())
    alone = torch.cat([layer(row, torch.float32) for row in x.split(1)])
    for num_rows, first in itertools.product(BLOCK_EDGES, (0, 5)):
        rows = slice(first, first + num_rows)
        assert torch.equal(layer(x[rows], torch.float32), alone[rows]), (num_rows, first)


def test_torch_may_use_the_tile_registers_in_between() -> None:
    """torch's own products in bfloat16 set the shapes of the same registers, in the same threads."""
    weight = whole_numbers(1, 512, 512)
    layer = layer_of(weight)
    for num_rows in (200, 3, 64, 1):
        x = whole_numbers(num_rows, num_rows, 512)
        truth = x.double() @ weight.double().T
        for _ in range(3):
            assert torch.equal(layer(x, torch.float32).double(), truth)
            assert torch.equal(functional.linear(x, weight), truth.bfloat16())


@pytest.mark.parametrize(("bits", "group_size", "num_groups", "zero"), INTEGER_WEIGHTS)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_integers_are_those_of_vector_instructions(
    bits: int, group_size: int, num_groups: int, zero: str, x_dtype: torch.dtype
) -> None:
    """Bit for bit: sums of integers are exact, and all that follows is computed in the same order."""
    weight = integer_weight(bits, group_size, num_groups, zero)
    by_vectors, by_tiles = (
        pack_integers(open_kernels(name), HugePages(), weight, torch.ones(70), gate=None)
        for name in ("avx512_bf16", AMX)
    )
    x = torch.randn(130, weight.shape[1], generator=torch.Generator().manual_seed(3)).to(x_dtype)
    x[::3, [1, weight.shape[1] - 1]] *= 50  # outliers, in some rows
    for num_rows in BLOCK_EDGES:
        rows = x[-num_rows:]
        assert torch.equal(by_tiles(rows, torch.float32), by_vectors(rows, torch.float32)), num_rows
