"""Qwen2.5-VL (arXiv:2502.13923): Qwen2.5 behind a tower for images, most of whose layers have windows."""

from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.families.qwen2 import read_windows
from inflight.config.families.qwen_vision import (
    GGUF_SECTIONS,
    layer_numbers,
    sections_from_gguf,
    tower_fields,
    with_sections,
    without_sections,
)
from inflight.config.families.vision_family import VisionFamily
from inflight.config.json_fields import JsonFields
from inflight.config.vision import Qwen25VisionSpec


def _parse(fields: FamilyFields) -> ModelArchitecture:
    attention = without_sections(fields).attention(theta=1e6)
    rope = with_sections(fields, attention.rope, attention.head_dim, (16, 24, 24), is_interleaved=False)
    layer = LayerSpec(mixer=replace(attention, rope=rope, qkv_bias=True), mlp=fields.mlp())
    return fields.architecture(fields.layers_with_windows(layer, read_windows(fields)), eps=1e-5)


def _read_tower(config: JsonFields, model: ModelArchitecture) -> Qwen25VisionSpec:
    sizes = {"hidden_size": 3584, "out_hidden_size": 3584, "intermediate_size": 3420, "depth": 32, "patch_size": 14}
    found = tower_fields(config, model, "silu", image_token_id=151655, **sizes)
    tower = config.mapping("vision_config")
    window_size = tower.integer("window_size", 112)
    window = window_size // found["merge_size"] // found["patch_size"]
    if not window:
        raise tower.refusal(f"window_size={window_size} is less than the pixels of a token")
    full_layers = layer_numbers(tower, "fullatt_block_indexes", (7, 15, 23, 31), found["num_layers"])
    return Qwen25VisionSpec(**found, window=window, full_layers=full_layers)


_TEXT = Family(
    architecture="Qwen2_5_VLForConditionalGeneration",
    model_type="qwen2_5_vl_text",
    gguf_name="qwen2vl",
    gguf_fields=sections_from_gguf,
    gguf_keys=GGUF_SECTIONS,
    parse=_parse,
)
VISION_FAMILY = VisionFamily(
    architecture="Qwen2_5_VLForConditionalGeneration",
    model_type="qwen2_5_vl",
    texts=(_TEXT,),
    tower=Qwen25VisionSpec,
    read_tower=_read_tower,
)
