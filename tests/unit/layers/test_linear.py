"""Linear layers: the packed method against the plain one, fusion, and sharding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.linear import ColumnParallelLinear, OutputPart, RowParallelLinear, even_part, head_part
from inflight.layers.linear_method import OneDnnPackedLinear, PlainLinear, padded_rows, select_linear_method
from inflight.layers.weights import WeightSlot

CPU = torch.device("cpu")
ALONE = TensorParallelGroup()


class OneOfMany(TensorParallelGroup):
    """A rank whose partial results are left for the test to add up."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


def fill(slots: dict[str, WeightSlot], tensors: dict[str, torch.Tensor]) -> None:
    assert slots.keys() == tensors.keys()
    for name, slot in slots.items():
        assert tuple(tensors[name].shape) == slot.shape
        slot.destination.copy_(tensors[name].narrow(slot.dim, slot.start, slot.size))


def test_the_method_follows_device_and_dtype() -> None:
    assert isinstance(select_linear_method(CPU, torch.float32), PlainLinear)
    assert isinstance(select_linear_method(torch.device("cuda"), torch.bfloat16), PlainLinear)
    packed = isinstance(select_linear_method(CPU, torch.bfloat16), OneDnnPackedLinear)
    assert packed == OneDnnPackedLinear.is_available()


@pytest.mark.skipif(not OneDnnPackedLinear.is_available(), reason="oneDNN has no bf16 on this processor")
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4, 7, 33])
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 64), (20, 60), (33, 7), (1, 1), (203, 48)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_packed_weight_multiplies_as_the_plain_one(
    num_tokens: int, out_features: int, in_features: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).bfloat16()
        for shape in ((num_tokens, in_features), (out_features, in_features), (out_features,))
    )
    method = OneDnnPackedLinear()
    out = method.apply(x, method.prepare(weight), bias if has_bias else None)
    truth = F.linear(x.double(), weight.double(), bias.double() if has_bias else None)
    assert out.shape == truth.shape
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), truth, rtol=2**-8, atol=1e-2)  # one rounding of a float32 sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_projections_stand_side_by_side(dtype: torch.dtype) -> None:
    parts = {"q_proj": OutputPart(12, 0, 12), "k_proj": OutputPart(4, 0, 4)}
    layer = ColumnParallelLinear(8, parts, bias=True, dtype=dtype, device=CPU)
    tensors = {
        f"attn.{name}.{kind}": torch.randn(shape).to(dtype)
        for name, size in (("q_proj", 12), ("k_proj", 4))
        for kind, shape in (("weight", (size, 8)), ("bias", (size,)))
    }
    fill(dict(layer.weight_slots("attn")), tensors)
    layer.finish_loading()
    x = torch.randn(5, 8).to(dtype)
    query, key = layer(x).split((12, 4), dim=-1)
    for name, out in (("q_proj", query), ("k_proj", key)):
        truth = F.linear(x, tensors[f"attn.{name}.weight"], tensors[f"attn.{name}.bias"])
        torch.testing.assert_close(out, truth, rtol=2**-7, atol=1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ranks_of_a_column_and_a_row_add_up_to_the_whole(size: int) -> None:
    up, down, bias = torch.randn(16, 8), torch.randn(8, 16), torch.randn(8)
    x = torch.randn(3, 8)
    total = torch.zeros(3, 8)
    for rank in range(size):
        tp = OneOfMany(size, rank)
        column = ColumnParallelLinear(8, {"up_proj": even_part(16, tp)}, bias=False, dtype=torch.float32, device=CPU)
        row = RowParallelLinear(16, 8, bias=True, dtype=torch.float32, device=CPU, tp=tp)
        fill(dict(column.weight_slots("mlp")), {"mlp.up_proj.weight": up})
        fill(dict(row.weight_slots("mlp.down_proj")), {"mlp.down_proj.weight": down, "mlp.down_proj.bias": bias})
        column.finish_loading()
        row.finish_loading()
        total += row(column(x))
    torch.testing.assert_close(total, F.linear(F.linear(x, up), down, bias))


def test_heads_are_shared_where_there_are_fewer_than_ranks() -> None:
    def starts(num_heads: int, size: int) -> list[tuple[int, int]]:
        parts = [head_part(num_heads, 10, TensorParallelGroup(size, rank)) for rank in range(size)]
        assert all(part.total == num_heads * 10 for part in parts)
        return [(part.start, part.size) for part in parts]

    assert starts(4, 1) == [(0, 40)]
    assert starts(4, 2) == [(0, 20), (20, 20)]
    assert starts(2, 4) == [(0, 10), (0, 10), (10, 10), (10, 10)]
    assert starts(1, 2) == [(0, 10), (0, 10)]


def test_what_cannot_be_divided_is_an_invariant_broken() -> None:
    with pytest.raises(AssertionError, match="5 rows"):
        even_part(5, TensorParallelGroup(2, 0))
    with pytest.raises(AssertionError, match="3 heads"):
        head_part(3, 8, TensorParallelGroup(2, 0))


def test_a_group_of_several_ranks_has_to_bring_collectives() -> None:
    x = torch.ones(1)
    assert ALONE.all_reduce(x) is x
    assert ALONE.all_gather(x) is x
    with pytest.raises(AssertionError):
        TensorParallelGroup(2, 0).all_reduce(x)


def test_few_row_counts_reach_the_kernels() -> None:
    counts = {padded_rows(n) for n in range(1, 2049)}
    assert len(counts) <= 64 and {4, 8, 16, 32, 64, 512, 1024, 2048} <= counts
    for n in range(1, 2049):
        assert n <= padded_rows(n) <= max(4, n + 3, n * 1.25)
