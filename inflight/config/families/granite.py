"""Granite 3 (dense): Llama's layers with multipliers for embeddings, scores, logits, and for what layers add to the stream."""

from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import Family, with_residual_scale
from inflight.config.families.family_fields import FamilyFields


def _parse(fields: FamilyFields) -> ModelArchitecture:
    attention = fields.attention(absent_kv_heads_mean_all=True, reads_bias=True)
    attention = replace(attention, scale=fields.number("attention_multiplier", 1.0))
    layer = LayerSpec(attention=attention, mlp=fields.mlp(bias=fields.boolean("mlp_bias", False)))
    model = fields.architecture((layer,) * fields.num_layers)
    return with_residual_scale(
        model,
        fields.number("residual_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logits_scale=1 / fields.number("logits_scaling", 1.0),
    )


FAMILY = Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    gguf_name="granite",
    gguf_names={
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    gguf_interleaves_heads=True,
    parse=_parse,
    reads=("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
)
