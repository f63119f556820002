"""DeepSeek-V2 and V2-Lite (arXiv:2405.04434): multi-head latent attention, and experts, of which a token may use those of a few
groups only."""

from dataclasses import replace

from inflight.config.architecture import ModelArchitecture
from inflight.config.experts import HIGHEST, MoeSpec, RouterSpec
from inflight.config.families.expert_fields import (
    SHARED_EXPERTS,
    first_layers_dense,
    read_experts,
    read_scale,
    refuse_null,
    refuse_other_values,
    with_shared_experts,
)
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.mixers import LatentAttentionSpec
from inflight.config.parse_rope import parse_rope, yarn_mscale

_GREEDY = "greedy"
_GROUPS = "group_limited_greedy"


def read_latent_attention(
    fields: FamilyFields, *, interleaved: bool, value_dim: int | None = None
) -> LatentAttentionSpec:
    """
    Args:
        interleaved: the rotated pairs are neighbours.
        value_dim: if config.json has no v_head_dim, this value is used.
    """
    bias = fields.boolean("attention_bias", False)
    rank = fields.integer("kv_lora_rank")
    query_rank = fields.integer("q_lora_rank") if fields.values.get("q_lora_rank", 0) is not None else None
    nope_dim = fields.integer("qk_nope_head_dim")
    rope_dim = fields.integer("qk_rope_head_dim")
    value_dim = fields.integer("v_head_dim", value_dim)
    if bias and query_rank is None:
        raise fields.refusal("attention_bias without q_lora_rank is not supported")
    if rope_dim % 2:
        raise fields.refusal(f"qk_rope_head_dim={rope_dim} is odd; rotation needs pairs")
    rope = replace(parse_rope(fields, rope_dim), interleaved=interleaved)
    scaling = fields.mapping("rope_scaling" if fields.has("rope_scaling") else "rope_parameters")
    weight = scaling.number("mscale_all_dim") if scaling.values.get("mscale_all_dim") else 0.0
    return LatentAttentionSpec(
        num_heads=fields.integer("num_attention_heads"),
        head_dim=rank + rope_dim,
        rope=rope,
        scale=(nope_dim + rope_dim) ** -0.5 * yarn_mscale(rope.factor, weight) ** 2,
        qkv_bias=bias,
        output_bias=bias,
        rank=rank,
        query_rank=query_rank,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=value_dim,
    )


def _read_experts(fields: FamilyFields) -> MoeSpec:
    # transformers' class does not read these; DeepSeek's own code does
    refuse_other_values(fields, scoring_func="softmax", norm_topk_prob=False, moe_layer_freq=1)
    refuse_null(fields, "topk_method")
    method = fields.text("topk_method", _GREEDY)
    if method not in (_GREEDY, _GROUPS):
        raise fields.refusal(f"topk_method={method!r} is not supported; supported are {_GREEDY} and {_GROUPS}")
    router = RouterSpec(top_k=1, scale=read_scale(fields, 1.0), group_scoring=HIGHEST)
    if method == _GROUPS:
        router = replace(router, num_groups=fields.integer("n_group"), top_groups=fields.integer("topk_group"))
    experts = read_experts(fields, names=("n_routed_experts",), renormalizes=False, router=router)
    return with_shared_experts(fields, experts, 2)


def _parse(fields: FamilyFields) -> ModelArchitecture:
    attention = read_latent_attention(fields, interleaved=True)
    bias = fields.boolean("mlp_bias", False)
    layers = first_layers_dense(fields, [attention] * fields.num_layers, _read_experts, default=0, bias=bias)
    if bias and any(isinstance(layer.mlp, MoeSpec) for layer in layers):
        raise fields.refusal("mlp_bias=True is not supported in layers with experts")
    return replace(fields.architecture(layers), renames=(SHARED_EXPERTS,))


FAMILY = Family(architecture="DeepseekV2ForCausalLM", model_type="deepseek_v2", parse=_parse)
