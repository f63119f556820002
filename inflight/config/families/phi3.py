"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (arXiv:2404.14219): Llama's layers with fused projections, and longrope."""

from __future__ import annotations

from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import Family, make_architecture, read_attention, read_mlp, with_windows
from inflight.config.json_fields import JsonFields


def _parse(fields: JsonFields) -> ModelArchitecture:
    fields = _with_today_s_names(fields)
    partial = fields.number("partial_rotary_factor", 1.0)
    attention = read_attention(fields, absent_kv_heads_mean_all=True, partial_rotary_factor=partial)
    layer = LayerSpec(attention=replace(attention, is_fused=True), mlp=read_mlp(fields, is_fused=True))
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    windows = [window] * fields.integer("num_hidden_layers")
    layers = with_windows(layer, windows, fields.integer("max_position_embeddings"))
    return make_architecture(fields, FAMILY.architecture, layers, eps=1e-5)


def _with_today_s_names(fields: JsonFields) -> JsonFields:
    """The first releases call the scaling "su" or "yarn". transformers reads both as longrope."""
    changed = dict(fields.values)
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.mapping(name)
        if rope.text("rope_type", rope.text("type", "default")) in ("su", "yarn"):
            changed[name] = {**rope.values, "rope_type": "longrope"}
    changed.setdefault("original_max_position_embeddings", 4096)
    return JsonFields(changed, fields.where)


FAMILY = Family(architecture="Phi3ForCausalLM", model_type="phi3", parse=_parse, reads=("partial_rotary_factor",))
