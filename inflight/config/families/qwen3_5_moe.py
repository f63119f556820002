"""Qwen3.5 and 3.6 with experts, the models for text: the layers of Qwen3.5, and the experts of Qwen3-Next in each of them."""

from inflight.config.architecture import ModelArchitecture
from inflight.config.families.expert_fields import GGUF_GATED_EXPERTS, NUM_EXPERTS, refuse_other_values
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields, layers_with
from inflight.config.families.qwen3_5 import (
    GGUF_HYBRID,
    GGUF_HYBRID_KEYS,
    GGUF_HYBRID_TENSORS,
    hybrid_from_gguf,
    make_hybrid,
    read_hybrid_mixers,
)
from inflight.config.families.qwen3_next import read_gated_experts


def _parse(fields: FamilyFields) -> ModelArchitecture:
    refuse_other_values(fields, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
    experts = read_gated_experts(fields, renormalizes=True)
    return make_hybrid(fields, layers_with(read_hybrid_mixers(fields), experts))


FAMILY = Family(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    gguf_name="qwen35moe",
    gguf_has_experts=True,
    gguf_names={**GGUF_HYBRID, **GGUF_GATED_EXPERTS},
    gguf_fields=hybrid_from_gguf,
    gguf_keys=GGUF_HYBRID_KEYS,
    gguf_tensors=GGUF_HYBRID_TENSORS,
    gguf_tiles_value_heads=True,
    unread=("mtp.", "model.visual."),
    parse=_parse,
    reads=("partial_rotary_factor", *NUM_EXPERTS),
)
