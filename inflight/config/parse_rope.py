"""`parse_rope`: reads the rotary embedding from a config.json of transformers 4 or 5, and makes a `RopeConfig` of it."""

import math
from dataclasses import replace

from inflight.config.json_fields import JsonFields
from inflight.config.mixers import RopeConfig

_DEFAULT_THETA = 10000.0
# kind of rotary embedding -> the fields that this kind uses. Other fields are refused, because they could change the result.
_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": """
        factor original_max_position_embeddings attention_factor mscale mscale_all_dim beta_fast beta_slow truncate
        llama_4_scaling_beta
    """.split(),
    "proportional": ("factor",),
    "longrope": ("short_factor", "long_factor", "factor", "attention_factor", "original_max_position_embeddings"),
}
# The fields that belong to a kind, its name included.
SCALING_FIELDS = frozenset(
    {"rope_type", "type", "finetuned", *(field for fields in _FIELDS.values() for field in fields)}
)
_COMMON_FIELDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")
# Some checkpoints have this field although their kind of rotary embedding does not use it. Then the field is ignored.
_HARMLESS_FIELDS = ("original_max_position_embeddings",)


def parse_rope(
    config: JsonFields,
    head_dim: int,
    *,
    theta: float = _DEFAULT_THETA,
    rope: JsonFields | None = None,
    partial_rotary_factor: float | None = None,
) -> RopeConfig:
    """The rotary embedding that `config` describes. Transformers 4 writes the fields `rope_theta` and `rope_scaling`.
    Transformers 5 writes the content of both into one object, `rope_parameters`.

    Args:
        theta: if config.json has no theta, this value is used.
        rope: the object that describes the rotary embedding, if it is not one of the two above.
        partial_rotary_factor: if `rope` has no such field, this value is used. None: the family rotates whole heads, and any
            other value than 1 is refused.

    Raises:
        UnsupportedModelError: the kind of rotary embedding, or one of its fields, is not supported.
    """
    max_position_embeddings = config.integer("max_position_embeddings")
    if rope is None:
        # As in transformers, rope_scaling is used if both objects exist.
        rope = config.mapping("rope_scaling" if config.has("rope_scaling") else "rope_parameters")
        theta = config.number("rope_theta", theta)
    parsed = _parse_kind(config, rope, rope.number("rope_theta", theta), max_position_embeddings)
    factor = rope.number("partial_rotary_factor", partial_rotary_factor or 1.0)
    is_proportional = parsed.kind == "proportional"
    rotary_dim = 2 * int(head_dim * factor // 2) if is_proportional else int(head_dim * factor)
    is_allowed = is_proportional or partial_rotary_factor is not None
    if factor != 1 and (not is_allowed or rotary_dim % 2 or not 0 < rotary_dim < head_dim):
        raise rope.refusal(f"partial_rotary_factor={factor!r} is not supported")
    for factors in (parsed.factors, parsed.long_factors):
        if parsed.kind == "longrope" and len(factors) != rotary_dim // 2:
            raise rope.refusal(f"short_factor and long_factor must have {rotary_dim // 2} numbers, one for each pair")
    if rotary_dim == head_dim:
        return parsed
    return replace(parsed, rotary_dim=rotary_dim)


def _parse_kind(config: JsonFields, rope: JsonFields, theta: float, max_position_embeddings: int) -> RopeConfig:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in _FIELDS:
        raise rope.refusal(f"rope_type={kind!r} is not supported; supported are {', '.join(_FIELDS)}")
    unknown = sorted(
        field for field in rope.values if field not in (*_FIELDS[kind], *_COMMON_FIELDS, *_HARMLESS_FIELDS)
    )
    if unknown:
        raise rope.refusal(f"{', '.join(unknown)} is not supported for rope_type={kind!r}")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind in ("linear", "proportional"):
        default_factor = 1.0 if kind == "proportional" else None
        return RopeConfig(theta=theta, kind=kind, factor=rope.number("factor", default_factor))
    # The field may be at the top level of config.json or in the rope object. If it is in both, the top level counts. If it is
    # in neither, its value is max_position_embeddings.
    original = config.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", max_position_embeddings)
    )
    if kind == "llama3":
        low = rope.number("low_freq_factor")
        high = rope.number("high_freq_factor")
        if high <= low:
            raise rope.refusal(f"high_freq_factor={high} is not above low_freq_factor={low}")
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=rope.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=original,
        )
    factor = rope.number("factor", max_position_embeddings / original)
    if kind == "longrope":
        default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return RopeConfig(
            theta=theta,
            kind=kind,
            original_max_position_embeddings=original,
            attention_factor=rope.number("attention_factor", default),
            factors=rope.numbers("short_factor"),
            long_factors=rope.numbers("long_factor"),
        )
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(rope, factor),
        truncate=rope.boolean("truncate", True),
        query_beta=rope.number("llama_4_scaling_beta") if rope.has("llama_4_scaling_beta") else None,
    )


def _yarn_attention_factor(rope: JsonFields, factor: float) -> float:
    """The factor for cos and sin, from section 3.4 of YaRN (arXiv:2309.00071). DeepSeek has added `mscale` and
    `mscale_all_dim`."""
    if rope.has("attention_factor"):
        return rope.number("attention_factor")
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        return yarn_mscale(factor, rope.number("mscale")) / yarn_mscale(factor, rope.number("mscale_all_dim"))
    return yarn_mscale(factor)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
