"""Qwen1.5-MoE and Qwen2-MoE (arXiv:2407.10671): the attention of Qwen2, experts, and a shared expert with a gate."""

from dataclasses import replace

from inflight.config.architecture import ModelArchitecture
from inflight.config.experts import MoeSpec
from inflight.config.families.expert_fields import GGUF_GATED_EXPERTS, NUM_EXPERTS, read_experts, sparse_layers
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields


def _parse(fields: FamilyFields) -> ModelArchitecture:
    attention = replace(fields.attention(), qkv_bias=fields.boolean("qkv_bias", True))
    mixers = fields.mixers_with_windows(attention, _windows(fields))
    return fields.architecture(sparse_layers(fields, mixers, _read_experts))


def _read_experts(fields: FamilyFields) -> MoeSpec:
    shared_size = fields.integer("shared_expert_intermediate_size")
    return replace(read_experts(fields), shared_size=shared_size, has_shared_gate=True)


def _windows(fields: FamilyFields) -> list[int | None]:
    """Without layer_types, every other layer before max_window_layers has a window."""
    window = fields.window() if fields.boolean("use_sliding_window", False) else None
    stop = fields.integer("max_window_layers", 28, least=0)
    by_index = [window is not None and index % 2 == 0 and index < stop for index in range(fields.num_layers)]
    return fields.windows(by_index, window)


FAMILY = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    gguf_name="qwen2moe",
    gguf_has_experts=True,
    gguf_names=GGUF_GATED_EXPERTS,
    parse=_parse,
    reads=NUM_EXPERTS,
)
