"""LFM2 with experts (LFM2-8B-A1B): the layers of LFM2. All but the first ones have experts that are chosen by sigmoids with a
bias."""

from inflight.config.architecture import SIGMOID, ModelArchitecture
from inflight.config.experts import MoeSpec, RouterSpec
from inflight.config.families.expert_fields import (
    NUM_EXPERTS,
    first_layers_dense,
    read_experts,
    read_renormalizes,
    read_scale,
)
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.families.lfm2 import make_lfm2, read_lfm2_mixers


def _read_experts(fields: FamilyFields) -> MoeSpec:
    router = RouterSpec(
        top_k=1,
        scoring=SIGMOID,
        scale=read_scale(fields, 1.0),
        has_choice_bias=fields.boolean("use_expert_bias", True),
        sum_offset=1e-6,
    )
    return read_experts(fields, renormalizes=read_renormalizes(fields, default=True), router=router)


def _parse(fields: FamilyFields) -> ModelArchitecture:
    if not fields.has("layer_types"):
        raise fields.refusal("layer_types is missing; it says of each layer whether it is conv or full_attention")
    fields.require_silu()
    mixers = read_lfm2_mixers(fields, [False] * fields.num_layers)
    return make_lfm2(fields, first_layers_dense(fields, mixers, _read_experts, name="num_dense_layers", default=2))


FAMILY = Family(architecture="Lfm2MoeForCausalLM", model_type="lfm2_moe", parse=_parse, reads=NUM_EXPERTS)
