"""MiniCPM3: the latent attention of DeepSeek-V2, with multipliers for embeddings, logits, and what layers add to the stream."""

import math

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.deepseek_v2 import read_latent_attention
from inflight.config.families.family import Family, with_residual_scale
from inflight.config.families.family_fields import FamilyFields


def _parse(fields: FamilyFields) -> ModelArchitecture:
    hidden_size = fields.integer("hidden_size")
    num_layers = fields.num_layers
    value_dim = hidden_size // fields.integer("num_attention_heads")
    attention = read_latent_attention(fields, interleaved=False, value_dim=value_dim)
    layer = LayerSpec(mixer=attention, mlp=fields.mlp(bias=fields.boolean("mlp_bias", False)))
    model = fields.architecture((layer,) * num_layers, eps=1e-5, is_tied=True)
    return with_residual_scale(
        model,
        _number(fields, "scale_depth", 1.4, math.sqrt(num_layers)) / math.sqrt(num_layers),
        embedding_scale=fields.number("scale_emb", 12.0),
        logits_scale=_number(fields, "dim_model_base", 256, hidden_size) / hidden_size,
    )


def _number(fields: FamilyFields, name: str, absent: float, null: float) -> float:
    """`absent` and `null`: the values of a field that is not there, and of one that is null."""
    return null if fields.is_null(name) else fields.number(name, absent)


FAMILY = Family(
    architecture="MiniCPM3ForCausalLM", model_type="minicpm3", parse=_parse, reads=("scale_emb", "scale_depth")
)
