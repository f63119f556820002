"""OLMo 3 (arXiv:2512.13961): OLMo 2's layers. Three of four have a window, and a rotary embedding without scaling."""

from __future__ import annotations

from dataclasses import replace

from inflight.config.architecture import WHOLE, LayerSpec, ModelArchitecture
from inflight.config.families.family import (
    Family,
    make_architecture,
    read_attention,
    read_layer_types,
    read_mlp,
    read_ropes,
    read_window,
    with_windows,
)
from inflight.config.families.olmo2 import NORMS
from inflight.config.json_fields import JsonFields


def _parse(fields: JsonFields) -> ModelArchitecture:
    bias, window = fields.boolean("attention_bias", False), read_window(fields)
    attention = read_attention(fields, absent_kv_heads_mean_all=True, has_rope=False)
    attention = replace(attention, qkv_bias=bias, output_bias=bias, qk_norm=WHOLE)
    ropes = read_ropes(fields, attention.head_dim, theta=500000.0, local_theta=500000.0)
    full, local = (
        LayerSpec(attention=replace(attention, rope=rope), mlp=read_mlp(fields), norms=NORMS) for rope in ropes
    )
    by_index = [(index + 1) % 4 != 0 for index in range(fields.integer("num_hidden_layers"))]
    max_length = fields.integer("max_position_embeddings")
    layers = tuple(
        with_windows(local, [window], max_length)[0] if windowed else full
        for windowed in read_layer_types(fields, by_index, window)
    )
    return make_architecture(fields, FAMILY.architecture, layers, eps=1e-5)


FAMILY = Family(architecture="Olmo3ForCausalLM", model_type="olmo3", parse=_parse)
