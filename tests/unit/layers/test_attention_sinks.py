"""Sinks belong to query heads, so each rank has those of its own heads."""

from __future__ import annotations

import torch

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.attention_sinks import AttentionSinks
from tests.unit.layers.contexts import layer_context


def test_a_rank_has_the_sinks_of_its_heads() -> None:
    for rank in range(2):
        tp = TensorParallelGroup(2, rank)
        sinks = AttentionSinks(6, layer_context(torch.bfloat16, tp))
        ((name, slot),) = sinks.weight_slots("model.layers.0.self_attn.sinks")
        assert (name, slot.shape, slot.start, slot.size) == ("model.layers.0.self_attn.sinks", (6,), 3 * rank, 3)
        slot.destination.fill_(2.0)
        assert torch.equal(sinks.logits.data, torch.full((3,), 2.0)), "the attention has this tensor, in float32"
