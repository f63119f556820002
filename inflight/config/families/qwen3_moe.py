"""Qwen3-MoE (arXiv:2505.09388): the attention of Qwen3, with a mixture of experts in most layers."""

from dataclasses import replace

from inflight.config.architecture import ModelArchitecture
from inflight.config.families.expert_fields import (
    GGUF_EXPERTS,
    GGUF_RENORMALIZES,
    NUM_EXPERTS,
    read_experts,
    sparse_layers,
)
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.mixers import HEAD


def _parse(fields: FamilyFields) -> ModelArchitecture:
    attention = replace(fields.attention(reads_bias=True), qk_norm=HEAD)
    window = fields.window() if fields.boolean("use_sliding_window", False) else None
    num_layers = fields.num_layers
    fields.refuse_other_windows([window is not None] * num_layers, window, FAMILY.architecture)
    mixers = fields.mixers_with_windows(attention, [window] * num_layers)
    return fields.architecture(sparse_layers(fields, mixers, read_experts))


FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    gguf_name="qwen3moe",
    gguf_has_experts=True,
    gguf_names={**GGUF_EXPERTS, **GGUF_RENORMALIZES, "expert_feed_forward_length": "moe_intermediate_size"},
    # llama.cpp always renormalizes the weights of experts, as all published models of the family do
    gguf_fields=lambda given: {"norm_topk_prob": given.get("expert_weights_norm", True)},
    parse=_parse,
    reads=NUM_EXPERTS,
)
