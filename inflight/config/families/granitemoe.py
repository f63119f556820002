"""Granite 3 with experts: the dense Granite's layers and multipliers, with a mixture of experts instead of the MLP."""

from dataclasses import replace

from inflight.config.architecture import ModelArchitecture
from inflight.config.families.expert_fields import GGUF_EXPERTS, NUM_EXPERTS, read_experts
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.families.granite import GGUF_MULTIPLIERS, MULTIPLIERS, make_granite

_RENAMES = (
    (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
    (".block_sparse_moe.router.layer.", ".mlp.gate."),
)


def _parse(fields: FamilyFields) -> ModelArchitecture:
    experts = read_experts(fields, size="intermediate_size", renormalizes=True)
    return replace(make_granite(fields, experts), renames=_RENAMES)


FAMILY = Family(
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    gguf_name="granitemoe",
    gguf_has_experts=True,
    gguf_names={**GGUF_EXPERTS, **GGUF_MULTIPLIERS},
    gguf_interleaves_heads=True,
    parse=_parse,
    reads=(*NUM_EXPERTS, *MULTIPLIERS),
)
