"""Ministral 8B: Llama's layers, with windows in some of them."""

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import (
    Family,
    make_architecture,
    read_attention,
    read_layer_types,
    read_mlp,
    read_window,
    with_windows,
)
from inflight.config.json_fields import JsonFields


def _parse(fields: JsonFields) -> ModelArchitecture:
    window = read_window(fields)
    by_default = [window is not None] * fields.integer("num_hidden_layers")
    windows = [window if windowed else None for windowed in read_layer_types(fields, by_default, window)]
    layer = LayerSpec(attention=read_attention(fields), mlp=read_mlp(fields))
    return make_architecture(fields, with_windows(fields, layer, windows))


FAMILY = Family(architecture="MinistralForCausalLM", model_type="ministral", parse=_parse)
