"""DeepSeek-V3 (arXiv:2412.19437) and models with its layers, such as Kimi K2: the attention of DeepSeek-V2, and experts whose
scores are sigmoids and get a bias for the choice."""

from collections.abc import Mapping
from dataclasses import replace

from inflight.config.architecture import SIGMOID, ModelArchitecture
from inflight.config.experts import TWO_HIGHEST, MoeSpec, RouterSpec
from inflight.config.families.deepseek_v2 import (
    GGUF_KEYS,
    GGUF_NAMES,
    GGUF_TENSORS,
    latent_from_gguf,
    read_latent_attention,
)
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
from inflight.config.hidden_inputs import numbered_mtp


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
    return replace(
        fields.architecture(layers),
        renames=(SHARED_EXPERTS,),
        unread=drafting_layers(fields),
        mtp=numbered_mtp(fields.num_layers),
    )


def _from_gguf(given: Mapping[str, object]) -> dict[str, object]:
    """Files of 2025 do not say how many groups there are. V3 and R1 have 256 experts in 8 groups, the others no groups."""
    found = latent_from_gguf(given)
    if given.get("expert_group_count") is None and given.get("expert_count") != 256:
        found |= {"n_group": 1, "topk_group": 1}
    return found


FAMILY = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    gguf_name="deepseek2",
    gguf_has_experts=True,
    gguf_gating=(2,),
    gguf_names=GGUF_NAMES,
    gguf_fields=_from_gguf,
    gguf_keys=GGUF_KEYS,
    gguf_tensors=GGUF_TENSORS,
    parse=_parse,
)
