"""Ministral 3: Llama's layers with yarn. Queries beyond the length before scaling are multiplied by a factor that grows with
their position."""

from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.json_fields import JsonFields
from inflight.config.parse_rope import parse_rope

_ROPE = {
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _parse(fields: FamilyFields) -> ModelArchitecture:
    num_layers = fields.num_layers
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    fields.refuse_other_windows([window is not None] * num_layers, window, FAMILY.architecture)
    attention = fields.attention(head_dim=128, has_rope=False)
    given = fields.mapping("rope_parameters")
    values = {name: value for name, value in (given.values or _ROPE).items() if name != "max_position_embeddings"}
    rope = parse_rope(fields, attention.head_dim, rope=JsonFields(values, given.where))
    layer = LayerSpec(mixer=replace(attention, rope=rope), mlp=fields.mlp())
    return fields.architecture(fields.layers_with_windows(layer, [window] * num_layers), eps=1e-5)


FAMILY = Family(architecture="Ministral3ForCausalLM", model_type="ministral3", parse=_parse)
