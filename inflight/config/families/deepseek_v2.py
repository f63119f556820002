"""DeepSeek-V2 with dense layers: multi-head latent attention. (Layers with experts are computed by transformers.)"""

from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.mixers import LatentAttentionSpec
from inflight.config.parse_rope import parse_rope, yarn_mscale


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


def is_dense(fields: FamilyFields) -> bool:
    """Whether no layer has experts."""
    return fields.integer("first_k_dense_replace", 0) >= fields.num_layers


def make_dense(fields: FamilyFields, attention: LatentAttentionSpec, *, mlp_bias: bool = False) -> ModelArchitecture:
    if not is_dense(fields):
        raise fields.refusal(
            "layers with experts (from layer first_k_dense_replace="
            f"{fields.integer('first_k_dense_replace', 0)} on) are not supported by Inflight's own code; use "
            "model_impl='transformers'"
        )
    layer = LayerSpec(mixer=attention, mlp=fields.mlp(bias=mlp_bias))
    return fields.architecture((layer,) * fields.num_layers)


def _parse(fields: FamilyFields) -> ModelArchitecture:
    attention = read_latent_attention(fields, interleaved=True)
    return make_dense(fields, attention, mlp_bias=fields.boolean("mlp_bias", False))


FAMILY = Family(architecture="DeepseekV2ForCausalLM", model_type="deepseek_v2", parse=_parse, takes=is_dense)
