"""Mistral (arXiv:2310.06825): Llama's layers. The first release has a sliding window in every layer."""

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields


def _parse(fields: FamilyFields) -> ModelArchitecture:
    window = fields.window()
    num_layers = fields.num_layers
    fields.refuse_other_windows([window is not None] * num_layers, window, FAMILY.architecture)
    layer = LayerSpec(mixer=fields.attention(), mlp=fields.mlp())
    return fields.architecture(fields.layers_with_windows(layer, [window] * num_layers))


FAMILY = Family(architecture="MistralForCausalLM", model_type="mistral", parse=_parse)
