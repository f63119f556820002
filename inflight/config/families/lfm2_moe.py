"""LFM2 with experts (LFM2-8B-A1B): the layers of LFM2. All but the first ones have experts that are chosen by sigmoids with a
bias."""

from collections.abc import Mapping

from inflight.config.architecture import SIGMOID, ModelArchitecture
from inflight.config.experts import MoeSpec, RouterSpec
from inflight.config.families.expert_fields import (
    GGUF_EXPERTS,
    GGUF_RENORMALIZES,
    NUM_EXPERTS,
    first_layers_dense,
    read_experts,
    read_renormalizes,
    read_scale,
    refuse_other_values,
    scoring_from_gguf,
)
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.families.lfm2 import GGUF_KEYS, GGUF_TENSORS, lfm2_from_gguf, make_lfm2, read_lfm2_mixers


def _read_experts(fields: FamilyFields) -> MoeSpec:
    refuse_other_values(fields, scoring_func="sigmoid")  # of a GGUF file
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


def _from_gguf(given: Mapping[str, object]) -> dict[str, object]:
    found = lfm2_from_gguf(given) | scoring_from_gguf(given)
    count, with_attention = given.get("block_count"), found.get("full_attn_idxs", ())
    if isinstance(count, int) and isinstance(with_attention, list):
        kinds = {True: "full_attention", False: "conv"}
        found["layer_types"] = [kinds[index in with_attention] for index in range(count)]
    return found


FAMILY = Family(
    architecture="Lfm2MoeForCausalLM",
    model_type="lfm2_moe",
    gguf_name="lfm2moe",
    gguf_has_experts=True,
    gguf_names={
        **GGUF_EXPERTS,
        **GGUF_RENORMALIZES,
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_gating_func": "scoring_func",
        "expert_weights_scale": "routed_scaling_factor",
        "leading_dense_block_count": "num_dense_layers",
    },
    gguf_fields=_from_gguf,
    gguf_keys=GGUF_KEYS,
    gguf_tensors={**GGUF_TENSORS, "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    parse=_parse,
    reads=NUM_EXPERTS,
)
