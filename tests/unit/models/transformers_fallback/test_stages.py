"""`cut`: one pipeline stage of a model has its own layers, and what is before the first or after the last one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from inflight.config.pipeline_stage import PipelineStage, pipeline_stage
from inflight.errors import UnsupportedModelError
from inflight.models.transformers_fallback.stages import cut
from tests.support.model_zoo import FALLBACK_CONFIGS


def llama(*, is_tied: bool = False) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=is_tied, **sizes))


def weights(model: nn.Module) -> set[str]:
    """The modules with weights, and layers by their numbers."""
    names = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    return {name.split(".self_attn")[0].split(".mlp")[0].split(".input")[0].split(".post")[0] for name in names}


@pytest.mark.parametrize(
    ("is_tied", "rank", "wanted"),
    [
        (False, 0, {"model.embed_tokens", "model.layers.0"}),
        (False, 1, {"model.layers.1"}),
        (False, 2, {"model.layers.2", "model.norm", "lm_head"}),
        (True, 0, {"model.embed_tokens", "model.layers.0"}),
        (True, 1, {"model.layers.1"}),
        (True, 2, {"model.embed_tokens", "model.layers.2", "model.norm"}),  # the head has the embedding's weights
    ],
)
def test_a_stage_has_only_its_own_weights(is_tied: bool, rank: int, wanted: set[str]) -> None:
    model = llama(is_tied=is_tied)
    own = model.model.layers[rank]
    [kept] = cut(model, "model.layers", model.model.layers, pipeline_stage((1, 1, 1), rank))
    assert kept is own and weights(model) == wanted
    assert len(model.model.layers) == 3
    hidden = torch.zeros(1, 2, 16)
    others = [layer for layer in model.model.layers if layer is not own]
    assert all(layer(hidden, None, position_ids=None) is hidden for layer in others)
    assert all(layer.hidden_size == 16 for layer in others)  # a plain attribute of the layer


def test_a_whole_model_is_not_cut() -> None:
    model = llama()
    before = weights(model)
    assert cut(model, "model.layers", model.model.layers, PipelineStage(0, 3, 3)) is model.model.layers
    assert weights(model) == before and len(before) == 6


def test_a_decoder_without_a_head_is_cut_as_well() -> None:
    model = llama().model
    cut(model, "layers", model.layers, pipeline_stage((1, 2), 0))
    assert weights(model) == {"embed_tokens", "layers.0"}


def test_a_model_without_a_plan_is_refused() -> None:
    with torch.device("meta"):
        gpt2 = GPT2LMHeadModel(FALLBACK_CONFIGS["gpt2"][0])
    message = "GPT2LMHeadModel: transformers has no plan to cut it into stages; leave pipeline_parallel_size out"
    with pytest.raises(UnsupportedModelError, match=message):
        cut(gpt2, "transformer.h", gpt2.transformer.h, pipeline_stage((1, 1), 0))
    model = llama()
    with pytest.raises(UnsupportedModelError, match="no plan"):  # as many layers as config.json has
        cut(model, "model.layers", model.model.layers, pipeline_stage((2, 2), 0))
