"""Small models that read images, of every family, written by transformers, and their towers in our own code.

folder = write_vision_model(VISION_CONFIGS["smolvlm"][0], tmp_path / "model", seed=0)
tower = load(folder).tower
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma4Config,
    Idefics3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SmolVLMConfig,
)

from inflight.attention.selector import get_backend
from inflight.config.engine import ModelConfig, QuantizationConfig
from inflight.config.gguf_config import read_model_config
from inflight.config.parse_architecture import parse_architecture
from inflight.config.pipeline_stage import PipelineStage
from inflight.config.vision import Grid, SiglipSpec, VisionSpec
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.model_loader.loader import load_model
from inflight.models.causal_lm import CausalLM
from tests.support.encoders import BLOCK_SIZE
from tests.support.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE

_STANDARD_DEVIATION = 0.15
IMAGE_TOKEN = VOCAB_SIZE - 1

_SIGLIP: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "patch_size": 4,
    "image_size": 24,
}


def _idefics3(kind: Any, *, scale_factor: int, **tower: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = kind(
        text_config=FAMILY_CONFIGS["llama"][0].to_dict(),
        vision_config={**_SIGLIP, **tower},
        image_token_id=IMAGE_TOKEN,
        scale_factor=scale_factor,
    )
    return config


_QWEN: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "depth": 4,
    "num_heads": 3,
    "patch_size": 4,
    "out_hidden_size": 64,
}


def _qwen3_vl(**tower: Any) -> PreTrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    fields = {**FAMILY_CONFIGS["qwen3"][0].to_dict(), "model_type": "qwen3_vl_text", "rope_parameters": rope}
    return Qwen3VLConfig(
        text_config=fields,
        vision_config={**_QWEN, "num_position_embeddings": 49, "deepstack_visual_indexes": [2, 0], **tower},
        image_token_id=IMAGE_TOKEN,
    )


def _qwen3_vl_moe(**tower: Any) -> PreTrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    fields = {**FAMILY_CONFIGS["qwen3_moe"][0].to_dict(), "model_type": "qwen3_vl_moe_text", "rope_parameters": rope}
    return Qwen3VLMoeConfig(
        text_config=fields,
        vision_config={**_QWEN, "num_position_embeddings": 49, "deepstack_visual_indexes": [1], **tower},
        image_token_id=IMAGE_TOKEN,
    )


def _qwen2_5_vl(**tower: Any) -> PreTrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    fields = {**FAMILY_CONFIGS["qwen2"][0].to_dict(), "model_type": "qwen2_5_vl_text", "rope_parameters": rope}
    return Qwen2_5_VLConfig(
        text_config=fields,
        vision_config={**_QWEN, "window_size": 24, "fullatt_block_indexes": [1, 3], **tower},
        image_token_id=IMAGE_TOKEN,
    )


def _gemma4(text: int, *, bidirectional: str | None = None, **tower: Any) -> PreTrainedConfig:
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "patch_size": 4}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16}
    fields = FAMILY_CONFIGS["gemma4"][text].to_dict()
    return Gemma4Config(
        text_config={
            **fields,
            "pad_token_id": 0,
            "use_bidirectional_attention": bidirectional,
            "sliding_window": 5,  # less than an image
        },
        vision_config={**sizes, **heads, "pooling_kernel_size": 2, "position_embedding_size": 40, **tower},
        audio_config=None,
        image_token_id=IMAGE_TOKEN,
        video_token_id=IMAGE_TOKEN - 1,
        audio_token_id=IMAGE_TOKEN - 2,
    )


# The first of each family is the plain one.
VISION_CONFIGS: dict[str, list[PreTrainedConfig]] = {
    "smolvlm": [
        _idefics3(SmolVLMConfig, scale_factor=2),
        _idefics3(SmolVLMConfig, scale_factor=3, patch_size=5, image_size=33, hidden_act="gelu", layer_norm_eps=1e-3),
    ],
    "qwen3_vl": [
        _qwen3_vl(),
        _qwen3_vl(deepstack_visual_indexes=[], spatial_merge_size=1, hidden_act="silu", num_position_embeddings=4),
    ],
    "qwen3_vl_moe": [_qwen3_vl_moe()],
    "qwen2_5_vl": [
        _qwen2_5_vl(),
        _qwen2_5_vl(window_size=8, fullatt_block_indexes=[], temporal_patch_size=1, hidden_size=64, num_heads=4),
    ],
    "qwen3_5": [
        Qwen3_5Config(
            text_config=FAMILY_CONFIGS["qwen3_5"][0].to_dict(),
            vision_config={**_QWEN, "num_position_embeddings": 49},
            image_token_id=IMAGE_TOKEN,
        )
    ],
    "gemma3": [
        Gemma3Config(
            text_config={
                **FAMILY_CONFIGS["gemma3"][0].to_dict(),
                "sliding_window": 5,  # less than an image
                "tie_word_embeddings": False,  # otherwise the model repeats the last token, whatever the image is
            },
            tie_word_embeddings=False,
            vision_config={**_SIGLIP, "vision_use_head": False, "image_size": 36},
            mm_tokens_per_image=9,
            image_token_index=IMAGE_TOKEN,
        ),
        Gemma3Config(
            text_config=FAMILY_CONFIGS["gemma3"][1].to_dict(),
            vision_config={**_SIGLIP, "vision_use_head": True, "image_size": 23},
            mm_tokens_per_image=25,
            image_token_index=IMAGE_TOKEN,
        ),
    ],
    "gemma4": [
        _gemma4(1, bidirectional="vision"),
        _gemma4(0, use_clipped_linears=True, standardize=True, head_dim=24, pooling_kernel_size=3),
        _gemma4(3, bidirectional="vision", use_clipped_linears=True, hidden_activation="gelu", rms_norm_eps=1e-3),
    ],
    "idefics3": [_idefics3(Idefics3Config, scale_factor=2, hidden_size=64, num_attention_heads=4)],
}


def write_vision_model(config: PreTrainedConfig, folder: Path, seed: int) -> Path:
    """Draws the model and saves it in `folder`, which is created and returned. Weights, biases and norms are random, so that
    one that was left out shows."""
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator) * _STANDARD_DEVIATION
        is_scale = parameter.dim() == 1 and name.endswith("weight")
        is_offset = isinstance(config, Gemma3Config) and "post_layernorm" not in name and "layer_norm" not in name
        parameter.data.copy_(1.0 + values if is_scale and not is_offset else values)
    for name, buffer in model.named_buffers():  # of Gemma 4's tower
        value = torch.randn(buffer.shape, generator=generator) * _STANDARD_DEVIATION
        if name.endswith(("std_bias", "std_scale")):
            buffer.copy_(1.0 + value)
        elif name.endswith(("put_min", "put_max")):  # what is beyond them is a part of the numbers, but not most
            buffer.copy_((value + 1.2) * (-1 if name.endswith("min") else 1))
    model.save_pretrained(folder)
    return folder


def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:  # Any: each family has methods of its own
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    *,
    quantization: QuantizationConfig | None = None,
    load_format: str = "safetensors",
    language_model_only: bool = False,
    tp: TensorParallelGroup | None = None,
    stage: PipelineStage | None = None,
    mmproj: Path | None = None,
) -> CausalLM:
    """`folder` may also be a GGUF file, and `mmproj` its file for images."""
    config = read_model_config(folder, mmproj=mmproj)
    architecture = parse_architecture(config, language_model_only=language_model_only)
    model_config = ModelConfig(
        folder=folder,
        name="x",
        architecture=architecture,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=architecture.max_position_embeddings,
        load_format="gguf" if folder.is_file() else load_format,
        seed=0,
        fingerprint="",
        quantization=quantization or QuantizationConfig(),
        mmproj=mmproj,
    )
    backend = get_backend("cpu", architecture.head_dims, BLOCK_SIZE, dtype, dtype)
    return load_model(
        model_config, device=torch.device("cpu"), backend=backend, tp=tp or TensorParallelGroup(), stage=stage
    )


@torch.inference_mode()
def encode(model: CausalLM, pixels: Tensor, grid: Grid) -> Tensor:
    assert model.tower is not None
    return model.tower.encode(pixels, grid)


@torch.inference_mode()
def reference_features(model: Any, pixels: Tensor, grid: Grid) -> Tensor:
    """What `VisionTower.encode` returns, by transformers."""
    if model.config.model_type == "gemma3":
        projected: Tensor = model.get_image_features(pixel_values=pixels[None]).pooler_output[0]
        return projected
    if model.config.model_type == "gemma4":
        places = places_of_patches(grid)[None]
        (features,) = model.get_image_features(pixel_values=pixels[None], image_position_ids=places).pooler_output
        return torch.as_tensor(features)
    if model.config.model_type in ("smolvlm", "idefics3"):
        found: Tensor = model.get_image_features(pixel_values=pixels[None, None]).pooler_output[0]
        return found
    output = model.get_image_features(pixel_values=pixels, image_grid_thw=torch.tensor([grid]))
    features = [each[0] for each in getattr(output, "deepstack_features", None) or []]
    return torch.cat([output.pooler_output[0], *features], dim=1)


def places_of_patches(grid: Grid) -> Tensor:
    """The column and the row of each patch, as Gemma 4's processor returns them: int64 [num_patches, 2]."""
    return torch.cartesian_prod(torch.arange(grid[1]), torch.arange(grid[2])).flip(1)


def draw_image(spec: VisionSpec, grid: Grid, seed: int) -> Tensor:
    """Random pixels of an image of this grid, as a processor returns them."""
    frames, rows, columns = grid
    if isinstance(spec, SiglipSpec):
        shape: tuple[int, ...] = (spec.num_channels, rows * spec.patch_size, columns * spec.patch_size)
    else:
        shape = (frames * rows * columns, spec.patch_features)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
