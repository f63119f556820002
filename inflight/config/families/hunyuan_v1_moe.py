"""Hunyuan with experts (Hunyuan-A13B): Llama's layers with norms on queries and keys after their rotation, and experts with a
shared one of the same size."""

from collections.abc import Mapping
from dataclasses import replace

from inflight.config.architecture import ModelArchitecture
from inflight.config.experts import MoeSpec
from inflight.config.families.expert_fields import NUM_EXPERTS, read_experts, refuse_other_values
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields, layers_with
from inflight.config.mixers import ROTATED_HEAD, AttentionSpec
from inflight.errors import UnsupportedModelError

_RENAMES = (
    (".query_layernorm.", ".q_norm."),
    (".key_layernorm.", ".k_norm."),
    (".mlp.gate.wg.", ".mlp.gate."),
    (".mlp.shared_mlp.", ".mlp.shared_expert."),
)
# Fields that may have a number for each layer. All published models have the same one in all layers.
_OF_LAYERS = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")


def _parse(fields: FamilyFields) -> ModelArchitecture:
    fields = fields.with_values({name: _one(fields, name) for name in _OF_LAYERS if fields.has(name)})
    refuse_other_values(fields, use_qk_norm=True, use_cla=False, use_mla=False, num_shared_expert=1)
    layers = layers_with([_read_attention(fields)] * fields.num_layers, _read_experts(fields))
    return replace(fields.architecture(layers, eps=1e-5), renames=_RENAMES)


def _one(fields: FamilyFields, name: str) -> object:
    value = fields.values[name]
    if not isinstance(value, (list, tuple)) or not value:
        return value
    if any(each != value[0] for each in value):
        raise fields.refusal(f"{name}={list(value)!r} is not supported; one number for all layers is")
    return value[0]


def _read_attention(fields: FamilyFields) -> AttentionSpec:
    return replace(_with_alpha(fields).attention(absent_kv_heads_mean_all=True, reads_bias=True), qk_norm=ROTATED_HEAD)


def _with_alpha(fields: FamilyFields) -> FamilyFields:
    """The checkpoints call their rotary embedding "dynamic", but with `alpha` it does not depend on the length of a request:
    only theta is larger."""
    name = "rope_scaling" if fields.has("rope_scaling") else "rope_parameters"
    rope = fields.mapping(name)
    if rope.text("rope_type", rope.text("type", "default")) != "dynamic" or not rope.has("alpha"):
        return fields
    size = fields.integer("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    theta *= rope.number("alpha") ** (size / (size - 2))
    return fields.with_values({name: {"rope_type": "default", "rope_theta": theta}})


def _read_experts(fields: FamilyFields) -> MoeSpec:
    size = fields.integer("intermediate_size")
    refuse_other_values(fields, moe_intermediate_size=size)
    experts = read_experts(fields, size="intermediate_size", num_chosen="moe_topk", renormalizes=True)
    return replace(experts, shared_size=size)


def _from_gguf(given: Mapping[str, object]) -> dict[str, object]:
    """The rotary embedding of a file has the theta that `_with_alpha` computes."""
    size = given.get("feed_forward_length")
    if given.get("expert_shared_feed_forward_length", size) != size:
        raise UnsupportedModelError(
            f"the GGUF file's key expert_shared_feed_forward_length={given['expert_shared_feed_forward_length']!r} is not "
            f"supported; it has to be feed_forward_length, {size!r}"
        )
    return {}


FAMILY = Family(
    architecture="HunYuanMoEV1ForCausalLM",
    model_type="hunyuan_v1_moe",
    gguf_name="hunyuan-moe",
    gguf_has_experts=True,
    gguf_names={
        "expert_count": "num_experts",
        "expert_used_count": "moe_topk",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "num_shared_expert",
    },
    gguf_fields=_from_gguf,
    gguf_keys=("expert_shared_feed_forward_length",),
    parse=_parse,
    reads=(*NUM_EXPERTS, "use_qk_norm"),
)
