"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama's layers with biases on queries, keys and values, and windows in upper layers."""

from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields


def _parse(fields: FamilyFields) -> ModelArchitecture:
    layer = LayerSpec(mixer=replace(fields.attention(), qkv_bias=True), mlp=fields.mlp())
    return fields.architecture(fields.layers_with_windows(layer, read_windows(fields)))


def read_windows(fields: FamilyFields) -> list[int | None]:
    """The window of each layer. Without layer_types, the layers from max_window_layers on have one."""
    window = fields.window() if fields.boolean("use_sliding_window", False) else None
    first = fields.values.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        raise fields.refusal(f"max_window_layers={first!r} is not an integer")
    by_index = [window is not None and index >= first for index in range(fields.num_layers)]
    return fields.windows(by_index, window)


FAMILY = Family(architecture="Qwen2ForCausalLM", model_type="qwen2", parse=_parse, gguf_name="qwen2")
