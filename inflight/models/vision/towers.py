"""`make_tower`: the vision tower of each kind of specification."""

from collections.abc import Callable
from typing import Any

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
from inflight.models.vision.gemma4 import Gemma4Tower
from inflight.models.vision.qwen import Qwen3Tower, Qwen25Tower
from inflight.models.vision.siglip import Gemma3Tower, Idefics3Tower
from inflight.models.vision.tower import Embed, VisionTower

# Any: the class of specification that is the key
TOWERS: dict[type[VisionSpec], Callable[[Any, LayerContext], VisionTower]] = {
    Idefics3VisionSpec: Idefics3Tower,
    Gemma3VisionSpec: Gemma3Tower,
    Gemma4VisionSpec: Gemma4Tower,
    Qwen3VisionSpec: Qwen3Tower,
    Qwen25VisionSpec: Qwen25Tower,
}


def make_tower(spec: VisionSpec, context: LayerContext, embed: Embed) -> VisionTower:
    """`embed`: of the decoder."""
    if isinstance(spec, TransformersVisionSpec):
        # transformers is optional
        from inflight.models.transformers_fallback.tower import TransformersTower

        return TransformersTower(spec, context, embed)
    tower = TOWERS[type(spec)](spec, context)
    if context.device.type == "cpu":
        tower.group = context.tp
    return tower
