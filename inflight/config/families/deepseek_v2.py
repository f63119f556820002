"""DeepSeek-V2 and V2-Lite (arXiv:2405.04434): multi-head latent attention, and experts, of which a token may use those of a few
groups only."""

from collections.abc import Mapping
from dataclasses import replace

from inflight.config.architecture import ModelArchitecture
from inflight.config.experts import HIGHEST, MoeSpec, RouterSpec
from inflight.config.families.expert_fields import (
    GGUF_ROUTING,
    SHARED_EXPERTS,
    first_layers_dense,
    read_experts,
    read_scale,
    refuse_null,
    refuse_other_values,
    refuse_zero,
    routing_from_gguf,
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
        raise fields.impossible(f"topk_method={method!r} is not supported; supported are {_GREEDY} and {_GROUPS}")
    router = RouterSpec(top_k=1, scale=read_scale(fields, 1.0), group_scoring=HIGHEST)
    groups = ("n_group", "topk_group") if method == _GROUPS else ()
    for name in ("num_experts_per_tok", *groups):
        if not fields.has(name):  # transformers has no default for it
            raise fields.impossible(f"{name} is missing; it is needed to build the model")
    refuse_zero(fields, *groups)
    if groups:
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


# Keys of a GGUF file that `latent_from_gguf` reads, and names of tensors
GGUF_KEYS = (
    *(f"attention.{name}" for name in ("value_length", "key_length_mla", "value_length_mla", "q_lora_rank")),
    *("rope.dimension_count", "rope.scaling.yarn_log_multiplier"),
)
GGUF_NAMES = {**GGUF_ROUTING, "attention.kv_lora_rank": "kv_lora_rank"}
GGUF_TENSORS = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",  # in newer files, the two halves of kv_b_proj
    "attn_v_b": "self_attn.v_b_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}


def latent_from_gguf(given: Mapping[str, object]) -> dict[str, object]:
    """Fields of attention and routing. In newer files key_length and value_length are those of the cache, and other keys have
    the sizes of heads."""
    rope_dim = given.get("rope.dimension_count")
    key_size = given.get("attention.key_length_mla", given.get("attention.key_length"))
    nope_dim = key_size - rope_dim if isinstance(key_size, int) and isinstance(rope_dim, int) else None
    found = {
        **routing_from_gguf(given),
        "q_lora_rank": given.get("attention.q_lora_rank"),
        "qk_nope_head_dim": nope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": given.get("attention.value_length_mla", given.get("attention.value_length")),
    }
    factor = given.get("rope.scaling.yarn_log_multiplier")  # the converter has divided it by 10
    if given.get("rope.scaling.type") == "yarn" and isinstance(factor, int | float):
        mscale = round(10 * factor, 6)
        found["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": given.get("rope.scaling.factor"),
            "original_max_position_embeddings": given.get("rope.scaling.original_context_length"),
            "mscale": mscale,
            "mscale_all_dim": mscale,
        }
    return found


def _from_gguf(given: Mapping[str, object]) -> dict[str, object]:
    num_groups = given.get("expert_group_count", 1)
    has_groups = isinstance(num_groups, int) and num_groups > 1
    return {**latent_from_gguf(given), "topk_method": _GROUPS if has_groups else _GREEDY}


FAMILY = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    gguf_name="deepseek2",
    gguf_has_experts=True,
    gguf_gating=(None, 1),
    gguf_names=GGUF_NAMES,
    gguf_fields=_from_gguf,
    gguf_keys=GGUF_KEYS,
    gguf_tensors=GGUF_TENSORS,
    parse=_parse,
)
