"""Gemma 3, the models for text (arXiv:2503.19786): Gemma 2's layers with norms on query and key heads instead of soft caps.
Layers with a window, five of six, have a rotary embedding of their own. EmbeddingGemma (arXiv:2509.20354) has attention in
both directions."""

from dataclasses import replace
from functools import partial

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import Family, in_both_directions
from inflight.config.families.family_fields import FamilyFields
from inflight.config.families.gemma2 import NORMS, make_gemma, scale_from_gguf
from inflight.config.mixers import HEAD


def _parse(fields: FamilyFields) -> ModelArchitecture:
    is_causal = not fields.boolean("use_bidirectional_attention", False)
    if not is_causal:  # half of the window is on each side
        fields = fields.with_values({"sliding_window": fields.integer("sliding_window", 4096) // 2 + 1})
    attention = replace(
        fields.attention(head_dim=256, has_rope=False, reads_bias=True),
        scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        qk_norm=HEAD,
        sees_whole_images=is_causal,
    )
    mlp = fields.mlp(name="hidden_activation", default="gelu_pytorch_tanh")
    ropes = fields.ropes(attention.head_dim, theta=1e6, local_theta=1e4, local_name="rope_local_base_freq")
    layer = LayerSpec(mixer=attention, mlp=mlp, norms=NORMS)
    layers = fields.two_kinds_of_layers(layer, ropes, fields.integer("sliding_window_pattern", 6))
    model = replace(make_gemma(fields, layers), norm_offset=1.0)
    return model if is_causal else in_both_directions(model)


FAMILY = Family(
    architecture="Gemma3ForCausalLM",
    others=("Gemma3TextModel",),
    gguf_name="gemma3",
    gguf_names={
        "attention.sliding_window": "sliding_window",
        "attention.sliding_window_pattern": "sliding_window_pattern",
        "rope.freq_base_swa": "rope_local_base_freq",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    gguf_fields=partial(scale_from_gguf, num_layers=62),
    model_type="gemma3_text",
    parse=_parse,
    # transformers' Gemma 3 has a field for the cap of scores, but does not use it
    reads=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
)
