"""GLM-4.5, 4.6 and 4.7 (arXiv:2508.06471): grouped-query attention of which half of each head is rotated, and the experts of
DeepSeek-V3."""

from collections.abc import Mapping
from dataclasses import replace

from inflight.config.architecture import ModelArchitecture
from inflight.config.experts import MoeSpec
from inflight.config.families.deepseek_v3 import read_biased_experts
from inflight.config.families.expert_fields import (
    GGUF_ROUTING,
    SHARED_EXPERTS,
    drafting_layers,
    first_layers_dense,
    routing_from_gguf,
)
from inflight.config.families.family import Family, partial_rotation
from inflight.config.families.family_fields import FamilyFields
from inflight.config.hidden_inputs import numbered_mtp
from inflight.config.mixers import HEAD


def read_glm_experts(fields: FamilyFields) -> MoeSpec:
    return read_biased_experts(fields, num_groups=1, top_groups=1, scale=1.0)


def _parse(fields: FamilyFields) -> ModelArchitecture:
    share = fields.number("partial_rotary_factor", 0.5)
    attention = replace(
        fields.attention(partial_rotary_factor=share),
        qkv_bias=fields.boolean("attention_bias", False),
        qk_norm=HEAD if fields.boolean("use_qk_norm", False) else None,
    )
    layers = first_layers_dense(fields, [attention] * fields.num_layers, read_glm_experts, default=1)
    model = fields.architecture(layers, eps=1e-5)
    return replace(
        model, renames=(SHARED_EXPERTS,), unread=drafting_layers(fields), mtp=numbered_mtp(fields.num_layers)
    )


def _from_gguf(given: Mapping[str, object]) -> dict[str, object]:
    return {**routing_from_gguf(given), **partial_rotation(given)}


FAMILY = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    gguf_name="glm4moe",
    gguf_has_experts=True,
    gguf_names=GGUF_ROUTING,
    gguf_fields=_from_gguf,
    gguf_keys=("rope.dimension_count",),
    gguf_tensors={
        "post_attention_norm": "post_attention_layernorm",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    },
    parse=_parse,
    reads=("partial_rotary_factor", "use_qk_norm"),
)
