"""Qwen3.5 and 3.6 with their tower for images, which is that of Qwen3-VL without features for the first decoder layers."""

from inflight.config.architecture import ModelArchitecture
from inflight.config.families import qwen3_5
from inflight.config.families.qwen3_vl import read_qwen3_tower
from inflight.config.families.vision_family import VisionFamily
from inflight.config.json_fields import JsonFields
from inflight.config.vision import Qwen3VisionSpec


def read_tower(config: JsonFields, model: ModelArchitecture) -> Qwen3VisionSpec:
    return read_qwen3_tower(config, model, image_token_id=248056)


VISION_FAMILY = VisionFamily(
    architecture="Qwen3_5ForConditionalGeneration",
    model_type="qwen3_5",
    texts=(qwen3_5.FAMILY,),
    tower=Qwen3VisionSpec,
    read_tower=read_tower,
)
