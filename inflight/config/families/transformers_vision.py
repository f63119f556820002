"""Models whose towers for images the code of transformers computes. The part for text is one of Inflight's own families, or
transformers' code computes it, too (models/transformers_fallback/).

To add one: a row of `TYPES`, and its model in tests/support/transformers_vision_models.py. What such a model must be like:

- transformers puts embeddings of an image in the places of placeholder tokens, and changes nothing else of the decoder.
- Positions of the tokens are counted one by one, and a token sees those before it.
"""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from inflight.config.architecture import ModelArchitecture
from inflight.config.families.family import Family
from inflight.config.families.vision_family import VisionFamily
from inflight.config.json_fields import JsonFields
from inflight.config.vision import TransformersVisionSpec


class _Type(NamedTuple):
    """`text`: the model_type of its part for text where config.json names none; None if it is none of Inflight's own families.
    `image_token_id`: where config.json has none. `unread`: see `ModelArchitecture`."""

    model_type: str
    architecture: str
    text: str | None
    image_token_id: int
    unread: tuple[str, ...] = ()


TYPES = (
    _Type("aria", "AriaForConditionalGeneration", None, 9),
    _Type("aya_vision", "AyaVisionForConditionalGeneration", None, 255036),
    _Type("deepseek_vl", "DeepseekVLForConditionalGeneration", "llama", 100015),
    _Type("deepseek_vl_hybrid", "DeepseekVLHybridForConditionalGeneration", "llama", 100015),
    _Type("exaone4_5", "Exaone4_5_ForConditionalGeneration", None, 67),
    _Type("got_ocr2", "GotOcr2ForConditionalGeneration", "qwen2", 151859),
    _Type("idefics2", "Idefics2ForConditionalGeneration", "mistral", 32001),
    _Type("internvl", "InternVLForConditionalGeneration", "qwen2", 151667),
    # what draws images
    _Type("janus", "JanusForConditionalGeneration", "llama", 100581, ("model.vqmodel.", "model.generation_")),
    _Type("lighton_ocr", "LightOnOcrForConditionalGeneration", "qwen3", 151655),
    _Type("llava", "LlavaForConditionalGeneration", "llama", 32000),
    _Type("llava_next", "LlavaNextForConditionalGeneration", "llama", 32000),
    _Type("llava_next_video", "LlavaNextVideoForConditionalGeneration", "llama", 32001),
    _Type("llava_onevision", "LlavaOnevisionForConditionalGeneration", "qwen2", 151646),
    _Type("mistral3", "Mistral3ForConditionalGeneration", "mistral", 10),
    _Type("ovis2", "Ovis2ForConditionalGeneration", "qwen2", 151665),
    _Type("video_llama_3", "VideoLlama3ForConditionalGeneration", "qwen2", 151655),
    _Type("vipllava", "VipLlavaForConditionalGeneration", "llama", 32000),
)
# Our name of a size of a tower -> the names that towers have for it
_SIZES = {
    "hidden_size": ("hidden_size", "embed_dim", "width"),
    "num_layers": ("num_hidden_layers", "depth", "layers"),
    "num_heads": ("num_attention_heads", "num_heads", "heads"),
    "mlp_size": ("intermediate_size", "mlp_dim"),
}


def families(texts: tuple[Family, ...]) -> tuple[VisionFamily, ...]:
    """Those whose part for text may be one of `texts`."""
    return tuple(_family(each, texts) for each in TYPES if each.text is not None)


def tower_beside(config: Mapping[str, object], model: ModelArchitecture) -> TransformersVisionSpec | None:
    """The tower of a model whose part for text the code of transformers computes; None if it has none, or if it is not known
    that transformers' code for images can stand in front of this part.

    Raises:
        UnsupportedModelError: a field has an impossible value.
    """
    fields = JsonFields(config)
    found = next((each for each in TYPES if each.model_type == config.get("model_type")), None)
    if found is None or fields.is_null("vision_config"):
        return None
    return _read_tower(found, fields, model)


def _family(given: _Type, texts: tuple[Family, ...]) -> VisionFamily:
    usual = next(each for each in texts if each.model_type == given.text)
    return VisionFamily(
        architecture=given.architecture,
        model_type=given.model_type,
        texts=(usual, *(each for each in texts if each is not usual)),
        tower=TransformersVisionSpec,
        read_tower=partial(_read_tower, given),
        unread=given.unread,
        text_defaults=TEXT_DEFAULTS,
    )


def _read_tower(given: _Type, config: JsonFields, model: ModelArchitecture) -> TransformersVisionSpec:
    tower = config.mapping("vision_config")
    sizes: dict[str, Any] = {  # Any: the class has fields of other types, too
        ours: next((size for name in names if isinstance(size := tower.values.get(name), int)), 0)
        for ours, names in _SIZES.items()
    }
    name = "image_token_id" if config.has("image_token_id") else "image_token_index"
    sizes["num_layers"] = max(1, sizes["num_layers"])
    return TransformersVisionSpec(
        **sizes,
        image_token_id=config.integer(name, given.image_token_id, least=0),
        out_size=model.hidden_size,
        config_json=json.dumps({"model_type": given.model_type, **config.values}),
    )


# Released models leave out what is the default of transformers' configuration: LLaVA 1.5 has no sizes of its part for text.
TEXT_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    },
    "qwen2": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    },
}  # fmt: skip
