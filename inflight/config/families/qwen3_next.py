"""Qwen3-Next: the layers of Qwen3.5, with projections whose rows are grouped by key heads, and the experts of Qwen2-MoE."""

from dataclasses import replace

from inflight.config.architecture import ModelArchitecture
from inflight.config.experts import MoeSpec
from inflight.config.families.expert_fields import NUM_EXPERTS, read_experts, read_renormalizes, sparse_layers
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields, layers_with
from inflight.config.families.qwen3_5 import make_hybrid, read_hybrid_mixers


def read_gated_experts(fields: FamilyFields, *, renormalizes: bool) -> MoeSpec:
    """Experts with a shared one that has a gate."""
    fields.require_silu()
    experts = read_experts(fields, renormalizes=renormalizes)
    return replace(experts, shared_size=fields.integer("shared_expert_intermediate_size"), has_shared_gate=True)


def _parse(fields: FamilyFields) -> ModelArchitecture:
    mixers = read_hybrid_mixers(fields, is_grouped=True)
    if fields.values.get("num_experts") == 0:
        return make_hybrid(fields, layers_with(mixers, fields.silu_mlp()))
    experts = read_gated_experts(fields, renormalizes=read_renormalizes(fields, default=True))
    return make_hybrid(fields, sparse_layers(fields, mixers, experts))


FAMILY = Family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    unread=("mtp.",),
    parse=_parse,
    reads=("partial_rotary_factor", *NUM_EXPERTS),
)
