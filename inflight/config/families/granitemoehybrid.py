"""Granite 4 without Mamba layers and experts (350M, 1B, micro): the dense Granite's layers and multipliers, with one tensor for
gate and up. Some have no rotary embedding."""

from dataclasses import replace

from inflight.config.architecture import ModelArchitecture
from inflight.config.families.expert_fields import NUM_EXPERTS
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.families.granite import MULTIPLIERS, make_granite

_RENAMES = ((".shared_mlp.input_linear.", ".mlp.gate_up_proj."), (".shared_mlp.output_linear.", ".mlp.down_proj."))
_ATTENTION = {"attention", "full_attention"}  # in released checkpoints, and as transformers writes it


def _parse(fields: FamilyFields) -> ModelArchitecture:
    kinds = fields.texts("layer_types") or fields.texts("layers_block_type")
    if len(kinds) != fields.num_layers or set(kinds) - _ATTENTION:
        raise fields.refusal(
            f"layer_types={list(kinds)!r} is not supported; {fields.num_layers} entries, each of them attention, are"
        )
    if num_experts := fields.integer("num_local_experts", 8, least=0):
        raise fields.refusal(f"num_local_experts={num_experts} is not supported for {FAMILY.architecture}; 0 is")
    position = fields.text("position_embedding_type", "none")
    size = fields.integer("shared_intermediate_size", 1024)
    mlp = fields.with_values({"intermediate_size": size}).mlp(is_fused=True)
    model = make_granite(fields, mlp, has_rope=position == "rope")
    return replace(model, renames=_RENAMES)


FAMILY = Family(
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    parse=_parse,
    reads=(*MULTIPLIERS, *NUM_EXPERTS),
)
