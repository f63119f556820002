"""Qwen3-Next: the layers of Qwen3.5, with projections whose rows are grouped by key heads, and the experts of Qwen2-MoE."""

from collections.abc import Mapping
from dataclasses import replace

from inflight.config.architecture import ModelArchitecture
from inflight.config.experts import MoeSpec
from inflight.config.families.expert_fields import (
    GGUF_GATED_EXPERTS,
    NUM_EXPERTS,
    read_experts,
    read_renormalizes,
    sparse_layers,
)
from inflight.config.families.family import TENSORS, Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.families.qwen3_5 import (
    GGUF_HYBRID,
    GGUF_HYBRID_KEYS,
    GGUF_HYBRID_TENSORS,
    hybrid_from_gguf,
    make_hybrid,
    read_hybrid_mixers,
)

# No field of config.json: `_from_gguf` makes it, because llama.cpp's converter takes these projections apart. In files of 2025
# it did not, and called them ssm_in.
_IS_GROUPED = "projections_are_grouped"


def read_gated_experts(fields: FamilyFields, *, renormalizes: bool) -> MoeSpec:
    """Experts with a shared one that has a gate."""
    fields.require_silu()
    experts = read_experts(fields, renormalizes=renormalizes)
    return replace(experts, shared_size=fields.integer("shared_expert_intermediate_size"), has_shared_gate=True)


def _parse(fields: FamilyFields) -> ModelArchitecture:
    mixers = read_hybrid_mixers(fields, is_grouped=fields.boolean(_IS_GROUPED, True), has_sections=False)
    fields.require_silu()
    return make_hybrid(fields, sparse_layers(fields, mixers, _read_experts))


def _read_experts(fields: FamilyFields) -> MoeSpec:
    return read_gated_experts(fields, renormalizes=read_renormalizes(fields, default=True))


def _from_gguf(given: Mapping[str, object]) -> dict[str, object]:
    tensors = given[TENSORS]
    assert isinstance(tensors, list)
    return {**hybrid_from_gguf(given), _IS_GROUPED: any(name.endswith(".ssm_in.weight") for name in tensors)}


FAMILY = Family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    gguf_name="qwen3next",
    gguf_has_experts=True,
    gguf_names={**GGUF_HYBRID, **GGUF_GATED_EXPERTS},
    gguf_fields=_from_gguf,
    gguf_keys=GGUF_HYBRID_KEYS,
    gguf_tensors={**GGUF_HYBRID_TENSORS, "ssm_in": "linear_attn.in_proj_qkvz"},
    unread=("mtp.",),
    parse=_parse,
    reads=("partial_rotary_factor", *NUM_EXPERTS),
)
