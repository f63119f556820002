"""Mistral (arXiv:2310.06825): Llama's layers. The first release has a sliding window in every layer."""

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import (
    Family,
    fixed_layer_types,
    make_architecture,
    read_attention,
    read_mlp,
    read_window,
    with_windows,
)
from inflight.config.json_fields import JsonFields


def _parse(fields: JsonFields) -> ModelArchitecture:
    window, num_layers = read_window(fields), fields.integer("num_hidden_layers")
    fixed_layer_types(fields, [window is not None] * num_layers, window, FAMILY.architecture)
    layer = LayerSpec(attention=read_attention(fields), mlp=read_mlp(fields))
    return make_architecture(fields, with_windows(fields, layer, [window] * num_layers))


WRAPPER = "Mistral3ForConditionalGeneration", "mistral3"
UNREAD = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
FAMILY = Family(architecture="MistralForCausalLM", model_type="mistral", wrapper=WRAPPER, unread=UNREAD, parse=_parse)
