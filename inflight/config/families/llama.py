"""Llama 2, 3 and 3.1+ (arXiv:2302.13971): pre-norm layers with rotary embedding, grouped queries and a gated MLP."""

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import Family, fixed_layer_types, make_architecture, read_attention, read_mlp
from inflight.config.json_fields import JsonFields


def _parse(fields: JsonFields) -> ModelArchitecture:
    num_layers = fields.integer("num_hidden_layers")
    fixed_layer_types(fields, [False] * num_layers, None, FAMILY.architecture)
    # the configs of the first Llama models have no num_key_value_heads
    attention = read_attention(fields, absent_kv_heads_mean_all=True, reads_bias=True)
    layer = LayerSpec(attention=attention, mlp=read_mlp(fields, bias=fields.boolean("mlp_bias", False)))
    return make_architecture(fields, (layer,) * num_layers)


FAMILY = Family(
    architecture="LlamaForCausalLM", model_type="llama", parse=_parse, gguf_name="llama", gguf_interleaves_heads=True
)
