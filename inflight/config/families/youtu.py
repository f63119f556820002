"""Youtu-LLM: dense layers with the latent attention of DeepSeek-V3."""

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.deepseek_v2 import read_latent_attention
from inflight.config.families.family import Family, make_architecture, read_mlp
from inflight.config.json_fields import JsonFields


def _parse(fields: JsonFields) -> ModelArchitecture:
    attention = read_latent_attention(fields, interleaved=fields.boolean("rope_interleave", True))
    layers = (LayerSpec(attention=attention, mlp=read_mlp(fields)),) * fields.integer("num_hidden_layers")
    return make_architecture(fields, layers, is_tied=True)


FAMILY = Family(architecture="YoutuForCausalLM", model_type="youtu", parse=_parse)
