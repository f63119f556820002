"""Gemma 3 (arXiv:2503.19786) with its tower for images: a SigLIP tower for squares of one size."""

import math

from inflight.config.architecture import ModelArchitecture
from inflight.config.families import gemma3
from inflight.config.families.vision_family import VisionFamily, siglip_fields
from inflight.config.json_fields import JsonFields
from inflight.config.vision import Gemma3VisionSpec


def _read_tower(config: JsonFields, model: ModelArchitecture) -> Gemma3VisionSpec:
    sizes = {"hidden_size": 768, "num_attention_heads": 12, "patch_size": 16}
    found = siglip_fields(config.mapping("vision_config"), **sizes)
    num_tokens = config.integer("mm_tokens_per_image", 256)
    side = found["positions_per_side"]
    tokens_per_side = math.isqrt(num_tokens)
    if tokens_per_side**2 != num_tokens or side % tokens_per_side:
        raise config.refusal(
            f"mm_tokens_per_image={num_tokens} is not the square of a number that divides the {side} patches of a row"
        )
    name = "image_token_id" if config.has("image_token_id") else "image_token_index"
    return Gemma3VisionSpec(
        **found,
        image_token_id=config.integer(name, 262144, least=0),
        out_size=model.hidden_size,
        merge_size=side // tokens_per_side,
    )


VISION_FAMILY = VisionFamily(
    architecture="Gemma3ForConditionalGeneration",
    model_type="gemma3",
    texts=(gemma3.FAMILY,),
    tower=Gemma3VisionSpec,
    read_tower=_read_tower,
    unread=("model.vision_tower.head.",),
    renames=(("model.vision_tower.vision_model.", "model.vision_tower."),),
)
