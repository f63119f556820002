"""`make_tower`: the vision tower of each kind of specification."""

from pkgutil import resolve_name
from typing import cast

from inflight.config.vision import (
    Gemma3VisionSpec,
    Gemma4VisionSpec,
    Idefics3VisionSpec,
    Qwen3VisionSpec,
    Qwen25VisionSpec,
    TransformersVisionSpec,
    VisionSpec,
)
from inflight.layers.context import LayerContext
from inflight.models.vision.tower import Embed, VisionTower

# Imported when a model has one: that of transformers needs an optional package.
TOWERS: dict[type[VisionSpec], str] = {
    Idefics3VisionSpec: "inflight.models.vision.siglip:Idefics3Tower",
    Gemma3VisionSpec: "inflight.models.vision.siglip:Gemma3Tower",
    Gemma4VisionSpec: "inflight.models.vision.gemma4:Gemma4Tower",
    Qwen3VisionSpec: "inflight.models.vision.qwen:Qwen3Tower",
    Qwen25VisionSpec: "inflight.models.vision.qwen:Qwen25Tower",
    TransformersVisionSpec: "inflight.models.transformers_fallback.tower:TransformersTower",
}


def make_tower(spec: VisionSpec, context: LayerContext, embed: Embed) -> VisionTower:
    """`embed`: of the decoder."""
    tower_class = resolve_name(TOWERS[type(spec)])
    if isinstance(spec, TransformersVisionSpec):
        return cast("VisionTower", tower_class(spec, context, embed))
    tower = cast("VisionTower", tower_class(spec, context))
    if context.device.type == "cpu":
        tower.group = context.tp
    return tower
