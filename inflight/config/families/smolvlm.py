"""SmolVLM (arXiv:2504.05299): small models that are built like Idefics3."""

from inflight.config.families import llama
from inflight.config.families.idefics3 import read_tower
from inflight.config.families.vision_family import VisionFamily
from inflight.config.vision import Idefics3VisionSpec

VISION_FAMILY = VisionFamily(
    architecture="SmolVLMForConditionalGeneration",
    model_type="smolvlm",
    texts=(llama.FAMILY,),
    tower=Idefics3VisionSpec,
    read_tower=read_tower,
)
