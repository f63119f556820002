"""Llama 2, 3 and 3.1+ (arXiv:2302.13971): pre-norm layers with rotary embedding, grouped queries and a gated MLP."""

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields


def _parse(fields: FamilyFields) -> ModelArchitecture:
    num_layers = fields.num_layers
    fields.refuse_other_windows([False] * num_layers, None, FAMILY.architecture)
    # the configs of the first Llama models have no num_key_value_heads
    attention = fields.attention(absent_kv_heads_mean_all=True, reads_bias=True)
    layer = LayerSpec(mixer=attention, mlp=fields.mlp(bias=fields.boolean("mlp_bias", False)))
    return fields.architecture((layer,) * num_layers)


FAMILY = Family(
    architecture="LlamaForCausalLM", model_type="llama", parse=_parse, gguf_name="llama", gguf_interleaves_heads=True
)
