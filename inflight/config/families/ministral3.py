"""Ministral 3: Llama's layers with yarn. Queries beyond the length before scaling are multiplied by a factor that grows with
their position."""

from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import (
    Family,
    fixed_layer_types,
    make_architecture,
    read_attention,
    read_mlp,
    with_windows,
)
from inflight.config.families.mistral import UNREAD, WRAPPER
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


def _parse(fields: JsonFields) -> ModelArchitecture:
    num_layers = fields.integer("num_hidden_layers")
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    fixed_layer_types(fields, [window is not None] * num_layers, window, FAMILY.architecture)
    attention = read_attention(fields, head_dim=128, has_rope=False)
    given = fields.mapping("rope_parameters")
    values = {name: value for name, value in (given.values or _ROPE).items() if name != "max_position_embeddings"}
    rope = parse_rope(fields, attention.head_dim, rope=JsonFields(values, given.where))
    layer = LayerSpec(attention=replace(attention, rope=rope), mlp=read_mlp(fields))
    return make_architecture(fields, with_windows(fields, layer, [window] * num_layers), eps=1e-5)


FAMILY = Family(
    architecture="Ministral3ForCausalLM", model_type="ministral3", wrapper=WRAPPER, unread=UNREAD, parse=_parse
)
