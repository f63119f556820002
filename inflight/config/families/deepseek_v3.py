"""DeepSeek-V3 (arXiv:2412.19437) and models with its layers, such as Kimi K2: the attention of DeepSeek-V2, and experts whose
scores are sigmoids and get a bias for the choice."""

from dataclasses import replace

from inflight.config.architecture import SIGMOID, ModelArchitecture
from inflight.config.experts import TWO_HIGHEST, MoeSpec, RouterSpec
from inflight.config.families.deepseek_v2 import read_latent_attention
from inflight.config.families.expert_fields import (
    SHARED_EXPERTS,
    drafting_layers,
    first_layers_dense,
    read_experts,
    read_groups,
    read_renormalizes,
    read_scale,
    refuse_other_values,
    with_shared_experts,
)
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields


def read_biased_experts(fields: FamilyFields, *, num_groups: int, top_groups: int, scale: float) -> MoeSpec:
    """Experts that are chosen by sigmoids with a bias, and shared ones. The arguments are the defaults of fields: see
    `read_groups` and `read_scale`."""
    refuse_other_values(fields, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    router = RouterSpec(
        top_k=1, scoring=SIGMOID, scale=read_scale(fields, scale), has_choice_bias=True, group_scoring=TWO_HIGHEST
    )
    router = read_groups(fields, router, num_groups=num_groups, top_groups=top_groups)
    renormalizes = read_renormalizes(fields, default=True)
    experts = read_experts(fields, names=("n_routed_experts",), renormalizes=renormalizes, router=router)
    return with_shared_experts(fields, experts, 1)


def _read_experts(fields: FamilyFields) -> MoeSpec:
    return read_biased_experts(fields, num_groups=8, top_groups=4, scale=2.5)


def _parse(fields: FamilyFields) -> ModelArchitecture:
    attention = read_latent_attention(fields, interleaved=fields.boolean("rope_interleave", True))
    layers = first_layers_dense(fields, [attention] * fields.num_layers, _read_experts, default=3)
    return replace(fields.architecture(layers), renames=(SHARED_EXPERTS,), unread=drafting_layers(fields))


FAMILY = Family(architecture="DeepseekV3ForCausalLM", model_type="deepseek_v3", parse=_parse)
