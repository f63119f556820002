"""Youtu-LLM: dense layers with the latent attention of DeepSeek-V3."""

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.deepseek_v2 import read_latent_attention
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields


def _parse(fields: FamilyFields) -> ModelArchitecture:
    attention = read_latent_attention(fields, interleaved=fields.boolean("rope_interleave", True))
    layers = (LayerSpec(mixer=attention, mlp=fields.mlp()),) * fields.num_layers
    return fields.architecture(layers, is_tied=True)


FAMILY = Family(architecture="YoutuForCausalLM", model_type="youtu", parse=_parse)
