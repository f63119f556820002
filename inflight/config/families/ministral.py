"""Ministral 8B: Llama's layers, with windows in some of them."""

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields


def _parse(fields: FamilyFields) -> ModelArchitecture:
    window = fields.window()
    by_default = [window is not None] * fields.num_layers
    windows = fields.windows(by_default, window)
    layer = LayerSpec(mixer=fields.attention(), mlp=fields.mlp())
    return fields.architecture(fields.layers_with_windows(layer, windows))


FAMILY = Family(architecture="MinistralForCausalLM", model_type="ministral", parse=_parse)
