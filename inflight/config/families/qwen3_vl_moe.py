"""Qwen3-VL with experts (arXiv:2511.21631): the experts of Qwen3-MoE behind the tower of Qwen3-VL."""

from dataclasses import replace

from inflight.config.architecture import ModelArchitecture
from inflight.config.experts import MoeSpec
from inflight.config.families.expert_fields import (
    GGUF_EXPERTS,
    GGUF_RENORMALIZES,
    NUM_EXPERTS,
    read_experts,
    refuse_other_values,
    sparse_layers,
)
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.families.qwen3_vl import read_attention, read_deepstack_tower
from inflight.config.families.qwen_vision import GGUF_SECTIONS, sections_from_gguf
from inflight.config.families.vision_family import VisionFamily
from inflight.config.vision import Qwen3VisionSpec

# The rows of these tensors are the columns of the usual ones in released checkpoints, and not always in those of transformers.
_RENAMES = tuple((f".experts.{name}", f".experts.either.{name}") for name in ("gate_up_proj", "down_proj"))


def _parse(fields: FamilyFields) -> ModelArchitecture:
    refuse_other_values(fields, norm_topk_prob=True)
    mixers = [read_attention(fields, None)] * fields.num_layers
    return replace(fields.architecture(sparse_layers(fields, mixers, _read_experts)), renames=_RENAMES)


def _read_experts(fields: FamilyFields) -> MoeSpec:
    return read_experts(fields, renormalizes=True)


_TEXT = Family(
    architecture="Qwen3VLMoeForConditionalGeneration",
    model_type="qwen3_vl_moe_text",
    gguf_name="qwen3vlmoe",
    gguf_has_experts=True,
    gguf_names={**GGUF_EXPERTS, **GGUF_RENORMALIZES, "expert_feed_forward_length": "moe_intermediate_size"},
    gguf_fields=sections_from_gguf,
    gguf_keys=GGUF_SECTIONS,
    parse=_parse,
    reads=NUM_EXPERTS,
)
VISION_FAMILY = VisionFamily(
    architecture="Qwen3VLMoeForConditionalGeneration",
    model_type="qwen3_vl_moe",
    texts=(_TEXT,),
    tower=Qwen3VisionSpec,
    read_tower=read_deepstack_tower,
)
