"""Gemma 4, the models for text. Layers without a window have wider heads than those with one, and rotate a part of them.
Values are normed, too. In the small models the last layers read the keys and values of earlier ones, and each layer gets
vectors that depend on the tokens (layers/token_inputs.py). In 26B-A4B each layer has experts beside its MLP."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inflight.config.architecture import GatedMlpSpec, LayerSpec, ModelArchitecture, TokenInputsSpec
from inflight.config.experts import DenseAndMoeSpec, RouterSpec
from inflight.config.families.expert_fields import read_experts
from inflight.config.families.family import ROPE_FREQUENCIES, TENSORS, Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.families.gemma2 import NORMS, make_gemma
from inflight.config.json_fields import JsonFields
from inflight.config.mixers import HEAD, AttentionSpec, RopeConfig
from inflight.config.parse_rope import parse_rope
from inflight.errors import UnsupportedModelError

_PER_LAYER = ("head_dim", "num_key_value_heads")
_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


_RENAMES = (
    (".router.proj.", ".mlp.gate."),
    (".router.per_expert_scale", ".mlp.gate.per_expert_scale"),
    (".router.scale", ".mlp.gate_norm.weight"),
    (".experts.", ".mlp.experts."),
)


def _parse(fields: FamilyFields) -> ModelArchitecture:
    if fields.text("use_bidirectional_attention", "vision") != "vision":  # "vision" means tokens of images only
        raise fields.refusal(
            f"use_bidirectional_attention={fields.values['use_bidirectional_attention']!r} is not supported; "
            'null or "vision" is'
        )
    num_layers = fields.num_layers
    window = fields.window(512)
    windowed = fields.which_have_window([(index + 1) % 6 != 0 for index in range(num_layers)], window)
    windowed[-1] = False  # transformers makes the last layer one without a window
    num_shared = fields.integer("num_kv_shared_layers", 0, least=0)
    owners = _owners(fields, windowed, num_shared)
    mlp = fields.mlp(name="hidden_activation", default="gelu_pytorch_tanh")
    wide = replace(mlp, size=2 * mlp.size) if fields.boolean("use_double_wide_mlp", False) else mlp
    has_experts = fields.boolean("enable_moe_block", False)
    experts = _read_experts(fields, mlp) if has_experts else None
    norms = replace(NORMS, before_mlp=None) if has_experts else NORMS
    layers: list[LayerSpec] = []
    for index, (has_window, owner) in enumerate(zip(windowed, owners, strict=True)):
        attention = replace(_read_attention(fields, index, has_window), kv_layer=owner)
        dense = mlp if owner is None else wide
        both = dense if experts is None else replace(experts, dense=dense)
        layer = LayerSpec(mixer=attention, mlp=both, norms=norms, has_scalar=True)
        layers += fields.layers_with_windows(layer, [window if has_window else None])
    return replace(
        make_gemma(fields, tuple(layers)),
        token_inputs=_read_token_inputs(fields, mlp.activation),
        renames=_RENAMES if has_experts else (),
        # checkpoints may have weights for keys and values that no layer uses
        unread=tuple(
            f"model.layers.{index}.self_attn.{name}"
            for index in range(num_layers - num_shared, num_layers)
            for name in ("k_proj.", "v_proj.", "k_norm.")
        ),
    )


def _read_experts(fields: FamilyFields, dense: GatedMlpSpec) -> DenseAndMoeSpec:
    router = RouterSpec(top_k=1, has_expert_scale=True)
    experts = read_experts(fields, names=("num_experts",), num_chosen="top_k_experts", renormalizes=True, router=router)
    experts = replace(experts, activation=dense.activation)
    return DenseAndMoeSpec(dense=dense, moe=experts, eps=fields.number("rms_norm_eps", 1e-6))


def _owners(fields: FamilyFields, windowed: list[bool], num_shared: int) -> list[int | None]:
    """For each layer the one whose keys and values it reads: the last one of its kind before the shared layers. None: it has
    its own."""
    first = len(windowed) - num_shared
    last_of_kind = {kind: index for index, kind in enumerate(windowed[: max(0, first)])}
    if not set(windowed) <= set(last_of_kind):
        raise fields.refusal(
            f"num_kv_shared_layers={num_shared} of {len(windowed)} layers leaves no layer of each kind in "
            "layer_types before them"
        )
    return [None if index < first else last_of_kind[kind] for index, kind in enumerate(windowed)]


def _read_attention(fields: FamilyFields, index: int, has_window: bool) -> AttentionSpec:
    is_equal = not has_window and fields.boolean("attention_k_eq_v", False)
    given = fields.mapping("per_layer_config")
    # transformers writes the numbers of layers with leading zeros: "05"
    written = str(index or "")
    name = next((name for name in given.values if name.lstrip("0") == written), str(index))
    own = given.mapping(name)
    if unknown := sorted(set(own.values) - set(_PER_LAYER)):
        raise own.refusal(f"{', '.join(unknown)} is not supported; {' and '.join(_PER_LAYER)} are")
    values = {name: own.values[name] for name in _PER_LAYER if own.has(name)}
    if not has_window and "per_layer_config" not in fields.values:  # null means that all layers are alike
        values["head_dim"] = fields.integer("global_head_dim", 512)
        if is_equal and fields.has("num_global_key_value_heads"):
            values["num_key_value_heads"] = fields.integer("num_global_key_value_heads")
    attention = fields.with_values(values).attention(head_dim=256, has_rope=False, reads_bias=True)
    return replace(
        attention,
        rope=_read_rope(fields, attention.head_dim, has_window),
        scale=1.0,
        qk_norm=HEAD,
        has_value_norm=True,
        values_are_keys=is_equal,
        # "vision" in the larger models; in the smaller ones the field is null, and tokens of images are like all others
        sees_whole_images=has_window and fields.has("use_bidirectional_attention"),
    )


def _read_rope(fields: FamilyFields, head_dim: int, has_window: bool) -> RopeConfig:
    kind = "sliding_attention" if has_window else "full_attention"
    ropes = fields.mapping("rope_parameters")
    rope = ropes.mapping(kind) if fields.has("rope_parameters") else JsonFields(_ROPES[kind], ropes.where)
    return parse_rope(fields, head_dim, rope=rope)


def _read_token_inputs(fields: FamilyFields, activation: str) -> TokenInputsSpec | None:
    size = fields.integer("hidden_size_per_layer_input", 256, least=0)
    if not size:
        return None
    vocab_size = fields.integer("vocab_size_per_layer_input", 262144)
    if vocab_size < fields.integer("vocab_size"):
        raise fields.refusal(
            f"vocab_size_per_layer_input={vocab_size} is less than vocab_size={fields.integer('vocab_size')}"
        )
    padding_id = fields.integer("pad_token_id", 0, least=0)
    if padding_id >= vocab_size:
        raise fields.refusal(f"pad_token_id={padding_id} is not less than vocab_size_per_layer_input={vocab_size}")
    return TokenInputsSpec(vocab_size=vocab_size, size=size, activation=activation, padding_id=padding_id)


def _from_gguf(given: Mapping[str, object]) -> dict[str, object]:
    """The keys key_length and head_count_kv are of layers without a window, or have a number for each layer."""
    count = given.get("block_count")
    windowed = _of_layers(given.get("attention.sliding_window_pattern"), count)
    sizes = _of_layers(given.get("feed_forward_length"), count)
    heads = _of_layers(given.get("attention.head_count_kv"), count)
    full = {"rope_type": "proportional", "partial_rotary_factor": _rotated_share(given)}
    full["rope_theta"] = given.get("rope.freq_base", 1e6)
    found: dict[str, object] = {
        "enable_moe_block": bool(given.get("expert_count")),
        "global_head_dim": given["attention.key_length"],
        "head_dim": given.get("attention.key_length_swa", given["attention.key_length"]),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed],
        "intermediate_size": min(sizes, default=None),
        "use_double_wide_mlp": len(set(sizes)) > 1,
        "num_key_value_heads": next(
            (n for n, each in zip(heads, windowed, strict=False) if each), heads[0] if heads else None
        ),
        "num_global_key_value_heads": next((n for n, each in zip(heads, windowed, strict=False) if not each), None),
        "attention_k_eq_v": _have_no_values(given[TENSORS]),
        "vocab_size_per_layer_input": given["vocab_size"],
        "hidden_size_per_layer_input": given.get("embedding_length_per_layer_input", 0),
        "num_kv_shared_layers": given.get("attention.shared_kv_layers", 0),
        # the file has no key for it: in the released models those without inputs of each layer are the larger ones
        "use_bidirectional_attention": None if given.get("embedding_length_per_layer_input") else "vision",
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": given.get("rope.freq_base_swa", 1e4)},
        },
    }
    return found


def _of_layers(value: Any, count: object) -> list[Any]:  # Any: a number or truth value, for each layer or for all
    return value if isinstance(value, list) else [value] * count if isinstance(count, int) else []


def _rotated_share(given: Mapping[str, object]) -> float:
    """Of the pairs of a head that are not rotated, the file has divisors that make the frequencies 0."""
    divisors = given.get(ROPE_FREQUENCIES, [1.0])
    assert isinstance(divisors, list)
    num_rotated = sum(each == 1 for each in divisors)
    if divisors[:num_rotated] != [1.0] * num_rotated or any(each < 1e20 for each in divisors[num_rotated:]):
        raise UnsupportedModelError(
            f"{ROPE_FREQUENCIES}.weight is not supported; its numbers should be 1, and then 1e30"
        )
    return float(num_rotated) / len(divisors)


def _have_no_values(names: object) -> bool:
    assert isinstance(names, list)
    keys = {name for name in names if name.endswith(".attn_k.weight")}
    return not {name.replace(".attn_k.", ".attn_v.") for name in keys} <= set(names)


FAMILY = Family(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    gguf_name="gemma4",
    gguf_names={
        "attention.sliding_window": "sliding_window",
        "final_logit_softcapping": "final_logit_softcapping",
        "expert_count": "num_experts",
        "expert_used_count": "top_k_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    gguf_fields=_from_gguf,
    gguf_keys=(
        *(f"attention.{name}" for name in ("head_count_kv", "key_length_swa", "value_length_swa", "shared_kv_layers")),
        *("attention.sliding_window_pattern", "feed_forward_length", "embedding_length_per_layer_input"),
        *("rope.dimension_count_swa", "rope.freq_base_swa", ROPE_FREQUENCIES),
    ),
    gguf_tensors={
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp.scale": "mlp.gate_norm.weight",
        "ffn_down_exps.scale": "mlp.gate.per_expert_scale",
        "layer_output_scale.weight": "layer_scalar",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
    unread=("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
    parse=_parse,
    reads=("final_logit_softcapping", "use_bidirectional_attention", "num_experts"),
)
