"""Granite 3 (dense): Llama's layers with multipliers for embeddings, scores, logits, and for what layers add to the stream."""

from dataclasses import replace

from inflight.config.architecture import LayerSpec, MlpSpec, ModelArchitecture
from inflight.config.families.family import Family, with_residual_scale
from inflight.config.families.family_fields import FamilyFields

MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
# Keys of a GGUF file with the values of these fields
GGUF_MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def _parse(fields: FamilyFields) -> ModelArchitecture:
    return make_granite(fields, fields.mlp(bias=fields.boolean("mlp_bias", False)))


def make_granite(fields: FamilyFields, mlp: MlpSpec, *, has_rope: bool = True) -> ModelArchitecture:
    """The model with this MLP in every layer. `has_rope`: see `FamilyFields.attention`."""
    attention = fields.attention(absent_kv_heads_mean_all=True, reads_bias=True, has_rope=has_rope)
    attention = replace(attention, scale=fields.number("attention_multiplier", 1.0))
    layer = LayerSpec(mixer=attention, mlp=mlp)
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
    gguf_names=GGUF_MULTIPLIERS,
    gguf_interleaves_heads=True,
    parse=_parse,
    reads=MULTIPLIERS,
)
