"""A small model of each type whose tower the code of transformers computes, with the files of its processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.support.image_models import ImageFamily, byte_tokenizer, write_image_family
from tests.support.vision_models import write_vision_model

_VOCAB_SIZE = 320
_PATCH, _SIDE = 14, 28  # pixels
_HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_CLIP = {**_SIZE, "model_type": "clip_vision_model", "num_hidden_layers": 3, "image_size": _SIDE, "patch_size": _PATCH}
_SIGLIP = {
    **_SIZE,
    "model_type": "siglip_vision_model",
    "image_size": _SIDE,
    "patch_size": _PATCH,
    "vision_use_head": False,
}
_PIXTRAL = {**_SIZE, "model_type": "pixtral", "image_size": 112, "patch_size": _PATCH, "head_dim": 16}
_INTERN = {**_SIZE, "image_size": [_SIDE, _SIDE], "patch_size": [7, 7]}
_SAM = {
    "hidden_size": 32,
    "output_channels": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 16,
    "mlp_dim": 64,
    "window_size": 2,
    "global_attn_indexes": [0, 1],
}
_PINPOINTS = [[_SIDE, 2 * _SIDE], [2 * _SIDE, _SIDE], [2 * _SIDE, 2 * _SIDE]]
_SQUARE = {"height": _SIDE, "width": _SIDE}


class TowerType(NamedTuple):
    """
    Attributes:
        processor: the name of its class, and of its module in transformers.models.
        image_processor: preprocessor_config.json.
        config: config.json, without the ids of tokens.
        token_ids: fields of config.json -> the token or tokens whose ids they have.
        text_config: what the part for text has besides the sizes that all have.
        seed: one whose random model answers differently to different images.
    """

    text: str
    processor: tuple[str, str]
    image_processor: Mapping[str, Any]
    config: Mapping[str, Any]
    token_ids: Mapping[str, str | list[str]]
    processor_config: Mapping[str, Any] = {}
    tokenizer_config: Mapping[str, Any] = {}
    special_tokens: Sequence[str] = ("<image>", "<video>")
    placeholder: str = "<image>"
    image_token: str = "<image>"
    text_config: Mapping[str, Any] = {}
    seed: int = 1


def _clip_processor(name: str, **more: Any) -> dict[str, Any]:
    return {
        "image_processor_type": name,
        "size": {"shortest_edge": _SIDE},
        "crop_size": _SQUARE,
        "do_resize": True,
        "do_center_crop": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        **_HALVES,
        **more,
    }


_LLAVA = {"patch_size": _PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_INDEX = {"image_token_index": "<image>"}
_INTERN_NAMES = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_GOT = {
    "image_processor_type": "GotOcr2ImageProcessor",
    "size": _SQUARE,
    "crop_to_patches": True,
    "min_patches": 1,
    "max_patches": 4,
    **_HALVES,
}
_OVIS = [f"<IMG_{name}>" for name in ("START", "GRID", "COL", "ROW", "END")]

TYPES: dict[str, TowerType] = {
    "aria": TowerType(
        text="aria_text",
        processor=("aria", "AriaProcessor"),
        image_processor={"image_processor_type": "AriaImageProcessor", "max_image_size": 980, **_HALVES},
        config={
            "vision_config": {**_SIZE, "model_type": "idefics3_vision", "image_size": 980, "patch_size": 70},
            "projector_patch_to_query_dict": {"196": 12},
        },
        token_ids=_INDEX,
        processor_config={"size_conversion": {"980": 12}},
        tokenizer_config={"extra_special_tokens": {"image_token": "<image>"}},
        text_config={"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    ),
    "aya_vision": TowerType(
        text="cohere2",
        processor=("aya_vision", "AyaVisionProcessor"),
        image_processor=_GOT,
        config={"vision_config": _SIGLIP, "downsample_factor": 2},
        token_ids={"image_token_index": "<|IMG_PATCH|>"},
        processor_config={"patch_size": _PATCH, "img_size": _SIDE, "downsample_factor": 2},
        tokenizer_config={"pad_token": "<image>"},
        special_tokens=("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>"),
        image_token="<|IMG_PATCH|>",
        text_config={"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"], "eos_token_id": 0},
        seed=5,
    ),
    "llava": TowerType(
        text="llama",
        processor=("llava", "LlavaProcessor"),
        image_processor=_clip_processor("CLIPImageProcessor"),
        config={"vision_config": _CLIP},
        token_ids=_INDEX,
        processor_config=_LLAVA,
    ),
    "vipllava": TowerType(
        text="llama",
        processor=("llava", "LlavaProcessor"),
        image_processor=_clip_processor("CLIPImageProcessor"),
        config={"vision_config": _CLIP, "vision_feature_layers": [-1, -2]},
        token_ids=_INDEX,
        processor_config=_LLAVA,
    ),
    "llava_next": TowerType(
        text="mistral",
        processor=("llava_next", "LlavaNextProcessor"),
        image_processor=_clip_processor("LlavaNextImageProcessor", image_grid_pinpoints=_PINPOINTS),
        config={"vision_config": _CLIP, "image_grid_pinpoints": _PINPOINTS},
        token_ids=_INDEX,
        processor_config=_LLAVA,
    ),
    "llava_next_video": TowerType(
        text="llama",
        processor=("llava_next_video", "LlavaNextVideoProcessor"),
        image_processor=_clip_processor("LlavaNextImageProcessor", image_grid_pinpoints=_PINPOINTS),
        config={"vision_config": _CLIP, "image_grid_pinpoints": _PINPOINTS},
        token_ids={**_INDEX, "video_token_index": "<video>"},
        processor_config=_LLAVA,
    ),
    "llava_onevision": TowerType(
        text="qwen2",
        processor=("llava_onevision", "LlavaOnevisionProcessor"),
        image_processor={
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": _SQUARE,
            "image_grid_pinpoints": _PINPOINTS,
            **_HALVES,
        },
        config={"vision_config": _SIGLIP, "image_grid_pinpoints": _PINPOINTS},
        token_ids={**_INDEX, "video_token_index": "<video>"},
        processor_config={"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    ),
    "mistral3": TowerType(
        text="mistral",
        processor=("pixtral", "PixtralProcessor"),
        image_processor={
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 112},
            "patch_size": _PATCH,
            **_HALVES,
        },
        config={"vision_config": _PIXTRAL, "spatial_merge_size": 2},
        token_ids={"image_token_index": "[IMG]"},
        processor_config={"patch_size": _PATCH, "spatial_merge_size": 2},
        special_tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        placeholder="[IMG]",
        image_token="[IMG]",
    ),
    "lighton_ocr": TowerType(
        text="qwen3",
        processor=("lighton_ocr", "LightOnOcrProcessor"),
        image_processor={
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 112},
            "patch_size": _PATCH,
            **_HALVES,
        },
        config={"vision_config": _PIXTRAL, "spatial_merge_size": 2},
        token_ids={"image_token_id": "<|image_pad|>"},
        processor_config={"patch_size": _PATCH, "spatial_merge_size": 2},
        tokenizer_config={
            "extra_special_tokens": {
                "image_token": "<|image_pad|>",
                "image_break_token": "<|vision_pad|>",
                "image_end_token": "<|vision_end|>",
            }
        },
        special_tokens=("<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"),
        placeholder="<|image_pad|>",
        image_token="<|image_pad|>",
    ),
    "internvl": TowerType(
        text="qwen2",
        processor=("internvl", "InternVLProcessor"),
        image_processor=_GOT,
        config={"vision_config": _INTERN},
        token_ids={"image_token_id": "<IMG_CONTEXT>"},
        processor_config={"image_seq_length": 4},
        tokenizer_config={"extra_special_tokens": _INTERN_NAMES},
        special_tokens=tuple(_INTERN_NAMES.values()),
        placeholder="<IMG_CONTEXT>",
        image_token="<IMG_CONTEXT>",
    ),
    "ovis2": TowerType(
        text="qwen2",
        processor=("ovis2", "Ovis2Processor"),
        image_processor={
            "image_processor_type": "Ovis2ImageProcessor",
            "size": _SQUARE,
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
            **_HALVES,
        },
        config={
            "vision_config": {
                **_SIZE,
                "image_size": _SIDE,
                "patch_size": 7,
                "vocab_size": 40,
                "num_visual_indicator_tokens": 5,
            },
            "vocab_size": _VOCAB_SIZE,
            "hidden_size": 64,
        },
        token_ids={"image_token_id": "<IMG_ATOM>", "visual_indicator_token_ids": _OVIS},
        processor_config={"image_seq_length": 16},
        special_tokens=("<image>", "<IMG_ATOM>", *_OVIS),
        image_token="<IMG_ATOM>",
    ),
    "idefics2": TowerType(
        text="mistral",
        processor=("idefics2", "Idefics2Processor"),
        image_processor={
            "image_processor_type": "Idefics2ImageProcessor",
            "size": {"longest_edge": 56, "shortest_edge": 28},
            "do_image_splitting": True,
            **_HALVES,
        },
        config={
            "vision_config": {**_SIZE, "image_size": 56, "patch_size": _PATCH},
            "perceiver_config": {
                "hidden_size": 64,
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 16,
                "num_key_value_heads": 1,
            },
        },
        token_ids={"image_token_id": "<image>"},
        processor_config={"image_seq_len": 4},
        special_tokens=("<image>", "<fake_token_around_image>", "<end_of_utterance>"),
    ),
    "exaone4_5": TowerType(
        text="exaone4",
        processor=("exaone4_5", "Exaone4_5_Processor"),
        image_processor={
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 28 * 28, "longest_edge": 112 * 112},
            "patch_size": _PATCH,
            "temporal_patch_size": 2,
            "merge_size": 2,
            **_HALVES,
        },
        config={
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "depth": 2,
                "num_heads": 2,
                "num_key_value_heads": 1,
                "out_hidden_size": 64,
                "patch_size": _PATCH,
                "window_size": 56,
                "fullatt_block_indexes": [1],
            }
        },
        token_ids={"image_token_id": "<image>", "video_token_id": "<video>"},
        tokenizer_config={"extra_special_tokens": {"image_token": "<image>", "video_token": "<video>"}},
        text_config={"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "got_ocr2": TowerType(
        text="qwen2",
        processor=("got_ocr2", "GotOcr2Processor"),
        image_processor={**_GOT, "size": {"height": 256, "width": 256}, "crop_to_patches": False},
        config={"vision_config": {**_SAM, "image_size": 256, "patch_size": 4}},  # its processor writes 256 tokens
        token_ids={"image_token_index": "<imgpad>"},
        tokenizer_config={"extra_special_tokens": {"image_token": "<imgpad>"}},
        special_tokens=("<imgpad>", "<img>", "</img>"),
        placeholder="<imgpad>",
        image_token="<imgpad>",
    ),
    "janus": TowerType(
        text="llama",
        processor=("janus", "JanusProcessor"),
        image_processor={"image_processor_type": "JanusImageProcessor", "size": _SQUARE, "min_size": _PATCH, **_HALVES},
        config={
            "vision_config": {
                **_SIZE,
                "image_size": _SIDE,
                "patch_size": _PATCH,
                "projection_dim": 64,
                "mlp_ratio": 2.0,
                "num_image_tokens": 4,
            },
            "vq_config": {
                "embed_dim": 8,
                "num_embeddings": 16,
                "latent_channels": 8,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "projection_dim": 64,
                "num_patches": 4,
                "image_token_embed_dim": 64,
            },
        },
        token_ids={"image_token_id": "<image_placeholder>"},
        processor_config={"num_image_tokens": 4},
        tokenizer_config={
            "extra_special_tokens": {
                "image_token": "<image_placeholder>",
                "boi_token": "<begin_of_image>",
                "eoi_token": "<end_of_image>",
            }
        },
        special_tokens=("<image_placeholder>", "<begin_of_image>", "<end_of_image>"),
        placeholder="<image_placeholder>",
        image_token="<image_placeholder>",
    ),
    "deepseek_vl": TowerType(
        text="llama",
        processor=("deepseek_vl", "DeepseekVLProcessor"),
        image_processor={
            "image_processor_type": "DeepseekVLImageProcessor",
            "size": _SQUARE,
            "min_size": _PATCH,
            **_HALVES,
        },
        config={"vision_config": _SIGLIP},
        token_ids={"image_token_id": "<image_placeholder>"},
        processor_config={"num_image_tokens": 4},
        tokenizer_config={"extra_special_tokens": {"image_token": "<image_placeholder>"}},
        special_tokens=("<image_placeholder>",),
        placeholder="<image_placeholder>",
        image_token="<image_placeholder>",
    ),
    "deepseek_vl_hybrid": TowerType(
        text="llama",
        processor=("deepseek_vl_hybrid", "DeepseekVLHybridProcessor"),
        image_processor={
            "image_processor_type": "DeepseekVLHybridImageProcessor",
            "size": _SQUARE,
            "min_size": _PATCH,
            "high_res_size": {"height": 64, "width": 64},
            "high_res_image_mean": [0.5, 0.5, 0.5],
            "high_res_image_std": [0.5, 0.5, 0.5],
            **_HALVES,
        },
        config={"vision_config": _SIGLIP, "high_res_vision_config": {**_SAM, "model_type": "sam_vision_model"}},
        token_ids={"image_token_id": "<image_placeholder>"},
        processor_config={"num_image_tokens": 4},
        tokenizer_config={"extra_special_tokens": {"image_token": "<image_placeholder>"}},
        special_tokens=("<image_placeholder>",),
        placeholder="<image_placeholder>",
        image_token="<image_placeholder>",
    ),
    "video_llama_3": TowerType(
        text="qwen2",
        processor=("video_llama_3", "VideoLlama3Processor"),
        image_processor={
            "image_processor_type": "VideoLlama3ImageProcessor",
            "min_pixels": 28 * 28,
            "max_pixels": 56 * 56,
            "patch_size": _PATCH,
            "temporal_patch_size": 1,
            "merge_size": 1,
            **_HALVES,
        },
        config={"vision_config": {**_SIZE, "patch_size": _PATCH}},
        token_ids={"image_token_id": "<image>", "video_token_id": "<video>"},
        tokenizer_config={"extra_special_tokens": {"image_token": "<image>", "video_token": "<video>"}},
    ),
}


def family_of(name: str) -> ImageFamily:
    given = TYPES[name]
    module, processor = given.processor
    return ImageFamily(
        placeholder=given.placeholder,
        image_token=given.image_token,
        special_tokens=given.special_tokens,
        processor=(f"transformers.models.{module}.processing_{module}", processor),
        image_processor={**given.image_processor, "processor_class": processor},
        config={},
        processor_config={**given.processor_config, "processor_class": processor},
        tokenizer_config=given.tokenizer_config,
    )


def config_of(name: str, text: str | None = None) -> PreTrainedConfig:
    """`text`: another part for text than the usual one."""
    given = TYPES[name]
    tokenizer = byte_tokenizer(given.special_tokens)
    ids = {
        field: tokenizer.token_to_id(token)
        if isinstance(token, str)
        else [tokenizer.token_to_id(each) for each in token]
        for field, token in given.token_ids.items()
    }
    text_config: dict[str, Any] = {
        "model_type": text or given.text,
        "vocab_size": _VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        **given.text_config,
    }
    return CONFIG_MAPPING[name](**given.config, **ids, text_config=text_config, tie_word_embeddings=False)


def write_tower_type(name: str, folder: Path, text: str | None = None) -> Path:
    """Draws a model of this type, and writes it with the files of its processor. `text`: see `config_of`."""
    write_vision_model(config_of(name, text), folder, TYPES[name].seed)
    write_image_family(folder, family_of(name))
    return folder
