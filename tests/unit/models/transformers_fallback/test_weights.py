"""`WeightPlan`: a checkpoint that has the weights of both embedding and head, though config.json says that they are one."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inflight.models.transformers_fallback.weights import WeightPlan

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("stored", [{EMBEDDING, HEAD}, {EMBEDDING}, {HEAD}])
@pytest.mark.parametrize("do_differ", [False, True])
def test_of_two_equal_weights_one_is_left_unread_and_different_ones_are_both_used(
    stored: set[str], do_differ: bool
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=True, **sizes))
    plan = WeightPlan(model, dict.fromkeys(stored, (32, 16)), lambda one, other: do_differ)
    has_two = do_differ and len(stored) == 2
    [first, *others] = sorted(stored, reverse=True)
    assert plan.renamed == ({EMBEDDING: EMBEDDING, HEAD: HEAD} if has_two else {EMBEDDING: first})
    assert plan.unread == (set(others) if not has_two else set())
    assert plan.tied == (set() if has_two else {HEAD})
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (not has_two)
