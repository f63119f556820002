"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama's layers with biases on queries, keys and values, and windows in upper layers."""

from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import (
    Family,
    make_architecture,
    read_attention,
    read_layer_types,
    read_mlp,
    read_window,
    with_windows,
)
from inflight.config.json_fields import JsonFields
from inflight.errors import UnsupportedModelError


def _parse(fields: JsonFields) -> ModelArchitecture:
    layer = LayerSpec(attention=replace(read_attention(fields), qkv_bias=True), mlp=read_mlp(fields))
    return make_architecture(fields, with_windows(fields, layer, read_windows(fields)))


def read_windows(fields: JsonFields) -> list[int | None]:
    """The window of each layer. Without layer_types, the layers from max_window_layers on have one."""
    window = read_window(fields) if fields.boolean("use_sliding_window", False) else None
    first = fields.values.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        raise UnsupportedModelError(f"config.json: max_window_layers={first!r} is not an integer")
    by_index = [window is not None and index >= first for index in range(fields.integer("num_hidden_layers"))]
    return [window if windowed else None for windowed in read_layer_types(fields, by_index, window)]


FAMILY = Family(architecture="Qwen2ForCausalLM", model_type="qwen2", parse=_parse, gguf_name="qwen2")
