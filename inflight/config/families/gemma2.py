"""Gemma 2 (arXiv:2408.00118): norms before and after attention and MLP, soft caps, and windows in every second layer."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from inflight.config.architecture import LayerSpec, ModelArchitecture, NormNames
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields

NORMS = NormNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def _parse(fields: FamilyFields) -> ModelArchitecture:
    window = fields.window()
    attention = replace(
        fields.attention(head_dim=256, reads_bias=True),
        scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        soft_cap=fields.soft_cap("attn_logit_softcapping", 50.0),
    )
    mlp = fields.mlp(name="hidden_activation", default="gelu_pytorch_tanh")
    layer = LayerSpec(mixer=attention, mlp=mlp, norms=NORMS)
    by_index = [index % 2 == 0 for index in range(fields.num_layers)]
    windows = fields.windows(by_index, window)
    return replace(make_gemma(fields, fields.layers_with_windows(layer, windows), logits_cap=30.0), norm_offset=1.0)


def make_gemma(
    fields: FamilyFields, layers: tuple[LayerSpec, ...], *, logits_cap: float | None = None
) -> ModelArchitecture:
    """`logits_cap`: if config.json has no final_logit_softcapping, this value is used."""
    return replace(
        fields.architecture(layers, is_tied=True),
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        rounds_embedding_scale=True,
        logits_cap=fields.soft_cap("final_logit_softcapping", logits_cap),
    )


def scale_from_gguf(given: Mapping[str, object], num_layers: int) -> dict[str, object]:
    """GGUF files do not have the number from which the scale of scores is computed. It is the size of heads in all models but
    the largest, which has `num_layers`."""
    hidden_size = given.get("embedding_length")
    num_heads = given.get("attention.head_count")
    is_largest = given.get("block_count") == num_layers
    if is_largest and isinstance(hidden_size, int) and isinstance(num_heads, int) and num_heads:
        return {"query_pre_attn_scalar": hidden_size // num_heads}
    return {"query_pre_attn_scalar": given.get("attention.key_length")}


FAMILY = Family(
    gguf_name="gemma2",
    gguf_names={
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    gguf_fields=partial(scale_from_gguf, num_layers=46),
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    parse=_parse,
    reads=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
)
