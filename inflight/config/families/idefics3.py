"""Idefics3 (arXiv:2408.12637): a SigLIP tower for images of any size in front of Llama."""

from inflight.config.architecture import ModelArchitecture
from inflight.config.families import llama
from inflight.config.families.vision_family import VisionFamily, siglip_fields
from inflight.config.json_fields import JsonFields
from inflight.config.vision import Idefics3VisionSpec


def read_tower(config: JsonFields, model: ModelArchitecture) -> Idefics3VisionSpec:
    """The tower of Idefics3 and SmolVLM."""
    sizes = {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
    return Idefics3VisionSpec(
        **siglip_fields(config.mapping("vision_config"), **sizes),
        image_token_id=config.integer("image_token_id", 128257, least=0),
        out_size=model.hidden_size,
        merge_size=config.integer("scale_factor", 2),
    )


VISION_FAMILY = VisionFamily(
    architecture="Idefics3ForConditionalGeneration",
    model_type="idefics3",
    texts=(llama.FAMILY,),
    tower=Idefics3VisionSpec,
    read_tower=read_tower,
)
