"""Which rows a rank holds, and in which order."""

from __future__ import annotations

import pytest
import torch

from inflight.config.mixers import RopeConfig
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.sharding import OutputShard, even_shard, fused, head_shard, repeat_order, row_order


def test_one_tensor_with_the_rows_of_several_projections() -> None:
    order = torch.tensor([1, 0])
    parts = {"q": OutputShard(8, 2, 2, order=order), "k": OutputShard(4, 1, 1), "v": OutputShard(4, 3, 1)}
    found = fused("qkv", parts)
    assert [(name, part.total, part.start, part.size, part.source) for name, part in found.items()] == [
        ("q", 16, 2, 2, "qkv"),
        ("k", 16, 8 + 1, 1, "qkv"),
        ("v", 16, 8 + 4 + 3, 1, "qkv"),
    ]
    assert found["q"].order is order and parts["k"].source is None


def test_shares_of_ranks() -> None:
    ranks = [TensorParallelGroup(3, rank) for rank in range(3)]
    assert [even_shard(12, tp) for tp in ranks] == [OutputShard(12, 4 * rank, 4) for rank in range(3)]
    assert [head_shard(6, 5, tp) for tp in ranks] == [OutputShard(30, 10 * rank, 10) for rank in range(3)]
    copies = [head_shard(2, 5, TensorParallelGroup(6, rank)) for rank in range(6)]
    assert [(part.start, part.size) for part in copies] == [(0, 5)] * 3 + [(5, 5)] * 3
    with pytest.raises(AssertionError, match="4 heads, 6 ranks"):
        head_shard(4, 5, TensorParallelGroup(6, 0))


@pytest.mark.parametrize(
    ("rope", "order"),
    [
        (None, None),
        (RopeConfig(), None),
        (RopeConfig(rotary_dim=8), None),
        (RopeConfig(kind="proportional", rotary_dim=4), None),
        (RopeConfig(interleaved=True), [0, 2, 4, 6, 1, 3, 5, 7]),
        (RopeConfig(interleaved=True, rotary_dim=8), [0, 2, 4, 6, 1, 3, 5, 7]),
        (RopeConfig(rotary_dim=4), [0, 1, 4, 5, 2, 3, 6, 7]),
        (RopeConfig(rotary_dim=4, interleaved=True), [0, 2, 4, 5, 1, 3, 6, 7]),
    ],
)
def test_the_order_of_a_head_of_eight(rope: RopeConfig | None, order: list[int] | None) -> None:
    found = row_order(rope, 8)
    assert (None if found is None else found.tolist()) == order


def test_all_heads_have_one_order() -> None:
    assert repeat_order(torch.tensor([1, 0]), 6).tolist() == [1, 0, 3, 2, 5, 4]
