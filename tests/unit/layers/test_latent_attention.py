"""Latent attention computes what transformers computes with a key and a value for each head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.attention.backend import LayerStep
from inflight.layers.latent_attention import LatentAttention
from tests.support.full_context_attention import bind_caches
from tests.unit.layers.zoo_layers import HIDDEN_SIZE, assert_equal, both_models, drawn

NUM_TOKENS = 37


@pytest.mark.parametrize(
    ("family", "index"),
    [
        ("deepseek_v2", 0),
        ("deepseek_v2", 1),  # queries from a latent vector, biases, and a scaled rotary embedding
        ("deepseek_v2", 2),  # sizes that are not for the kernels
        ("deepseek_v3", 1),  # pairs of the rotary embedding as in Llama
        ("minicpm3", 0),
    ],
)
@torch.inference_mode()
def test_the_layer_is_that_of_transformers(family: str, index: int, tmp_path: Path) -> None:
    ours, theirs = both_models(family, index, tmp_path / "model")
    bind_caches(ours, NUM_TOKENS)
    hidden, positions = drawn(NUM_TOKENS, HIDDEN_SIZE), torch.arange(NUM_TOKENS)
    mask = torch.full((NUM_TOKENS, NUM_TOKENS), -torch.inf).triu(1)[None, None]
    metadata: Any = (None,)  # Any: the backend reads none
    step = LayerStep(tuple(rotary(positions) for rotary in ours.rotaries), metadata)
    rows = torch.tensor([3, 36])
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        attention = layer.self_attn
        assert isinstance(attention, LatentAttention)
        cached = attention.attn.kv_cache_spec(16, torch.float32)
        assert (cached.num_kv_heads, cached.has_values) == (1, False), "all heads share one row of the cache"
        turned = theirs.rotary_emb(hidden[None], position_ids=positions[None])
        truth = other.self_attn(hidden[None], attention_mask=mask, position_embeddings=turned)[0][0]
        assert_equal(attention(hidden.clone(), step, None), truth)
        assert_equal(attention(hidden.clone(), step, rows), truth[rows])
