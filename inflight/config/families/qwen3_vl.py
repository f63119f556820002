"""Qwen3-VL (arXiv:2511.21631): Qwen3 behind a tower for images, whose layers in the middle also give features to the first
decoder layers."""

import math
from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
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
from inflight.config.mixers import HEAD, AttentionSpec
from inflight.config.vision import Qwen3VisionSpec


def read_attention(fields: FamilyFields, head_dim: int | None) -> AttentionSpec:
    """`head_dim`: if config.json does not name it; None: the heads divide the hidden size."""
    attention = without_sections(fields).attention(head_dim=head_dim, theta=500000.0, reads_bias=True)
    rope = with_sections(fields, attention.rope, attention.head_dim, (24, 20, 20), is_interleaved=True)
    return replace(attention, rope=rope, qk_norm=HEAD)


def _parse(fields: FamilyFields) -> ModelArchitecture:
    layer = LayerSpec(mixer=read_attention(fields, 128), mlp=fields.mlp())
    return fields.architecture((layer,) * fields.num_layers)


def read_qwen3_tower(config: JsonFields, model: ModelArchitecture, *, image_token_id: int) -> Qwen3VisionSpec:
    """The tower of Qwen3.5: without features for the first decoder layers. `image_token_id`: the default."""
    sizes = {"hidden_size": 1152, "out_hidden_size": 3584, "intermediate_size": 4304, "depth": 27, "patch_size": 16}
    found = tower_fields(config, model, "gelu_pytorch_tanh", image_token_id=image_token_id, **sizes)
    tower = config.mapping("vision_config")
    num_positions = tower.integer("num_position_embeddings", 2304)
    side = math.isqrt(num_positions)
    if side**2 != num_positions:
        raise tower.refusal(f"num_position_embeddings={num_positions} is not the square of an integer")
    return Qwen3VisionSpec(**found, positions_per_side=side)


def read_deepstack_tower(config: JsonFields, model: ModelArchitecture) -> Qwen3VisionSpec:
    spec = read_qwen3_tower(config, model, image_token_id=151655)
    tower = config.mapping("vision_config")
    layers = layer_numbers(tower, "deepstack_visual_indexes", (8, 16, 24), spec.num_layers)
    if len(layers) > model.num_layers:
        raise tower.refusal(
            f"deepstack_visual_indexes={list(layers)!r} needs more decoder layers than there are, {model.num_layers}"
        )
    return replace(spec, deepstack_layers=layers)


_TEXT = Family(
    architecture="Qwen3VLForConditionalGeneration",
    model_type="qwen3_vl_text",
    gguf_name="qwen3vl",
    gguf_fields=sections_from_gguf,
    gguf_keys=GGUF_SECTIONS,
    parse=_parse,
)
VISION_FAMILY = VisionFamily(
    architecture="Qwen3VLForConditionalGeneration",
    model_type="qwen3_vl",
    texts=(_TEXT,),
    tower=Qwen3VisionSpec,
    read_tower=read_deepstack_tower,
)
