"""Granite 3 (dense): Llama's layers with multipliers for embeddings, scores, logits, and for what layers add to the stream."""

from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import Family, make_architecture, read_attention, read_mlp, with_residual_scale
from inflight.config.json_fields import JsonFields


def _parse(fields: JsonFields) -> ModelArchitecture:
    attention = read_attention(fields, absent_kv_heads_mean_all=True, reads_bias=True)
    attention = replace(attention, scale=fields.number("attention_multiplier", 1.0))
    layer = LayerSpec(attention=attention, mlp=read_mlp(fields, bias=fields.boolean("mlp_bias", False)))
    model = make_architecture(fields, (layer,) * fields.integer("num_hidden_layers"))
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
