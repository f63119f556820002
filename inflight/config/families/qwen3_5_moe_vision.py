"""Qwen3.5 and 3.6 with experts, with their tower for images."""

from inflight.config.families import qwen3_5_moe
from inflight.config.families.qwen3_5_vision import read_tower
from inflight.config.families.vision_family import VisionFamily
from inflight.config.vision import Qwen3VisionSpec

VISION_FAMILY = VisionFamily(
    architecture="Qwen3_5MoeForConditionalGeneration",
    model_type="qwen3_5_moe",
    texts=(qwen3_5_moe.FAMILY,),
    tower=Qwen3VisionSpec,
    read_tower=read_tower,
)
