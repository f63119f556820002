"""Gemma 3, the models for text (arXiv:2503.19786): Gemma 2's layers with norms on query and key heads instead of soft caps.
Layers with a window, five of six, have a rotary embedding of their own."""

from dataclasses import replace
from functools import partial

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.families.gemma2 import NORMS, make_gemma, scale_from_gguf
from inflight.config.mixers import HEAD


def _parse(fields: FamilyFields) -> ModelArchitecture:
    attention = replace(
        fields.attention(head_dim=256, has_rope=False, reads_bias=True),
        scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        qk_norm=HEAD,
    )
    mlp = fields.mlp(name="hidden_activation", default="gelu_pytorch_tanh")
    ropes = fields.ropes(attention.head_dim, theta=1e6, local_theta=1e4, local_name="rope_local_base_freq")
    layer = LayerSpec(mixer=attention, mlp=mlp, norms=NORMS)
    layers = fields.two_kinds_of_layers(layer, ropes, fields.integer("sliding_window_pattern", 6))
    return replace(make_gemma(fields, layers), norm_offset=1.0)


FAMILY = Family(
    architecture="Gemma3ForCausalLM",
    gguf_name="gemma3",
    gguf_names={
        "attention.sliding_window": "sliding_window",
        "attention.sliding_window_pattern": "sliding_window_pattern",
        "rope.freq_base_swa": "rope_local_base_freq",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    gguf_fields=partial(scale_from_gguf, num_layers=62),
    model_type="gemma3_text",
    wrapper=("Gemma3ForConditionalGeneration", "gemma3"),
    unread=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    parse=_parse,
    # transformers' Gemma 3 has a field for the cap of scores, but does not use it
    reads=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
)
