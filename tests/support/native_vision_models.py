"""A small model of each family with a tower of ours, with the files of its processor. A token is a byte of a text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.support.image_models import FAMILIES, ImageFamily, byte_tokenizer, write_image_family
from tests.support.vision_models import VISION_CONFIGS, write_vision_model

_TILE, _MOST_PIXELS, _MOST_TOKENS = 24, 4096, 4096
_TILES = {"max_image_size": {"longest_edge": _TILE}, "size": {"longest_edge": 2 * _TILE}}
# Family -> what its processor has in place of the released one's fields, so that it fits the first of VISION_CONFIGS:
# preprocessor_config.json, processor_config.json
_FITTED: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "smolvlm": (_TILES, {"image_seq_len": 9}),
    "idefics3": (_TILES, {"image_seq_len": 9}),
    "qwen3_vl": ({"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": _MOST_PIXELS}}, {}),
    "qwen2_5_vl": ({"patch_size": 4, "min_pixels": 64, "max_pixels": _MOST_PIXELS}, {}),
    "gemma3": ({"image_seq_length": 9, "size": {"height": 36, "width": 36}}, {"image_seq_length": 9}),
    "gemma4": ({"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}, {}),
}
NATIVE = tuple(_FITTED)


def native_family(name: str) -> ImageFamily:
    family, (image_processor, processor) = FAMILIES[name], _FITTED[name]
    return family._replace(
        image_processor={**family.image_processor, **image_processor},
        processor_config={**family.processor_config, **processor},
        config={},
    )


def _config_of(name: str) -> PreTrainedConfig:
    family = FAMILIES[name]
    tokenizer = byte_tokenizer(family.special_tokens)
    fields = VISION_CONFIGS[name][0].to_dict()
    image = tokenizer.token_to_id(family.image_token)
    field = "image_token_index" if "image_token_index" in fields else "image_token_id"
    text = {**fields["text_config"], "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": _MOST_TOKENS}
    tower = dict(fields["vision_config"])
    if "position_embedding_size" in tower:  # Gemma 4's: it limits the rows of an image
        tower["position_embedding_size"] = _MOST_TOKENS
    return CONFIG_MAPPING[name](**{**fields, "text_config": text, "vision_config": tower, field: image})


def write_native_model(name: str, folder: Path) -> Path:
    """Draws a model of this family, and writes it with the files of its processor."""
    write_vision_model(_config_of(name), folder, seed=1)
    write_image_family(folder, native_family(name))
    return folder
