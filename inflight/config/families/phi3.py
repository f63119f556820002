"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (arXiv:2404.14219): Llama's layers with fused projections, and longrope."""

from collections.abc import Mapping
from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import Family, partial_rotation
from inflight.config.families.family_fields import FamilyFields


def _parse(fields: FamilyFields) -> ModelArchitecture:
    fields = _with_today_s_names(fields)
    partial = fields.number("partial_rotary_factor", 1.0)
    attention = fields.attention(absent_kv_heads_mean_all=True, partial_rotary_factor=partial)
    layer = LayerSpec(mixer=replace(attention, is_fused=True), mlp=fields.mlp(is_fused=True))
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    windows = [window] * fields.num_layers
    return fields.architecture(fields.layers_with_windows(layer, windows), eps=1e-5)


def _with_today_s_names(fields: FamilyFields) -> FamilyFields:
    """The first releases call the scaling "su" or "yarn". transformers reads both as longrope."""
    changed = {"original_max_position_embeddings": 4096, **fields.values}
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.mapping(name)
        if rope.text("rope_type", rope.text("type", "default")) in ("su", "yarn"):
            changed[name] = {**rope.values, "rope_type": "longrope"}
    return fields.with_values(changed)


_GGUF_FIELDS = {
    "attention.sliding_window": "sliding_window",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
_GGUF_ROPE = {
    "rope_factors_long": "long_factor",
    "rope_factors_short": "short_factor",
    "rope.scaling.attn_factor": "attention_factor",
}


def phi3_from_gguf(given: Mapping[str, object]) -> dict[str, object]:
    """Phi-4 has no window: its file has a window of 0 tokens."""
    found = {name: given[key] for key, name in _GGUF_FIELDS.items() if given.get(key)}
    if "rope_factors_long" in given:
        rope = {name: given[key] for key, name in _GGUF_ROPE.items() if key in given}
        found["rope_scaling"] = {"rope_type": "longrope", **rope}
    return found | partial_rotation(given)


# Keys that `phi3_from_gguf` reads
PHI3_KEYS = (*_GGUF_FIELDS, *_GGUF_ROPE, "rope.dimension_count")
FAMILY = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    gguf_name="phi3",
    gguf_fields=phi3_from_gguf,
    gguf_keys=PHI3_KEYS,
    gguf_tensors={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    parse=_parse,
    reads=("partial_rotary_factor",),
)
