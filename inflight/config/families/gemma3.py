"""Gemma 3, the models for text (arXiv:2503.19786): Gemma 2's layers with norms on query and key heads instead of soft caps.
Layers with a window, five of six, have a rotary embedding of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from inflight.config.architecture import HEAD, LayerSpec, ModelArchitecture
from inflight.config.families.family import (
    Family,
    make_architecture,
    read_attention,
    read_cap,
    read_layer_types,
    read_mlp,
    read_ropes,
    read_window,
    with_windows,
)
from inflight.config.families.gemma2 import NORMS, scale_from_gguf
from inflight.config.json_fields import JsonFields

_GGUF_FIELDS = {
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "rope.freq_base_swa": "rope_local_base_freq",
    "final_logit_softcapping": "final_logit_softcapping",
}


def _parse(fields: JsonFields) -> ModelArchitecture:
    bias, window = fields.boolean("attention_bias", False), read_window(fields)
    attention = replace(
        read_attention(fields, head_dim=256, has_rope=False),
        scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=HEAD,
    )
    mlp = read_mlp(fields, name="hidden_activation", default="gelu_pytorch_tanh")
    rope, local_rope = read_ropes(
        fields, attention.head_dim, theta=1e6, local_theta=1e4, local_name="rope_local_base_freq"
    )
    full, local = (
        LayerSpec(attention=replace(attention, rope=each), mlp=mlp, norms=NORMS) for each in (rope, local_rope)
    )
    pattern = fields.integer("sliding_window_pattern", 6)
    by_index = [(index + 1) % pattern != 0 for index in range(fields.integer("num_hidden_layers"))]
    max_length = fields.integer("max_position_embeddings")
    layers = tuple(
        with_windows(local, [window], max_length)[0] if windowed else full
        for windowed in read_layer_types(fields, by_index, window)
    )
    return replace(
        make_architecture(fields, FAMILY.architecture, layers, is_tied=True),
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        rounds_embedding_scale=True,
        logits_cap=read_cap(fields, "final_logit_softcapping", None),
        norm_offset=1.0,
    )


def _from_gguf(given: Mapping[str, object]) -> dict[str, object]:
    found = {name: given[key] for key, name in _GGUF_FIELDS.items() if key in given}
    return found | scale_from_gguf(given, num_layers=62)


FAMILY = Family(
    architecture="Gemma3ForCausalLM",
    gguf_name="gemma3",
    gguf_fields=_from_gguf,
    gguf_keys=tuple(_GGUF_FIELDS),
    model_type="gemma3_text",
    wrapper=("Gemma3ForConditionalGeneration", "gemma3"),
    unread=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    parse=_parse,
    # transformers' Gemma 3 has a field for the cap of scores, but does not use it
    reads=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
)
