"""Gemma 4, the dense models for text. Layers without a window have wider heads than those with one, and rotate a part of them.
Values are normed, too. In the small models the last layers read the keys and values of earlier ones, and each layer gets
vectors that depend on the tokens (layers/token_inputs.py)."""

from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture, TokenInputsSpec
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.families.gemma2 import NORMS, make_gemma
from inflight.config.json_fields import JsonFields
from inflight.config.mixers import HEAD, AttentionSpec, RopeConfig
from inflight.config.parse_rope import parse_rope

_PER_LAYER = ("head_dim", "num_key_value_heads")
_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def _parse(fields: FamilyFields) -> ModelArchitecture:
    if fields.boolean("enable_moe_block", False):
        raise fields.refusal("enable_moe_block=True is not supported: Inflight's own code has no mixtures of experts")
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
    layers: list[LayerSpec] = []
    for index, (has_window, owner) in enumerate(zip(windowed, owners, strict=True)):
        attention = replace(_read_attention(fields, index, has_window), kv_layer=owner)
        layer = LayerSpec(mixer=attention, mlp=mlp if owner is None else wide, norms=NORMS, has_scalar=True)
        layers += fields.layers_with_windows(layer, [window if has_window else None])
    return replace(
        make_gemma(fields, tuple(layers)),
        token_inputs=_read_token_inputs(fields, mlp.activation),
        # checkpoints may have weights for keys and values that no layer uses
        unread=tuple(
            f"model.layers.{index}.self_attn.{name}"
            for index in range(num_layers - num_shared, num_layers)
            for name in ("k_proj.", "v_proj.", "k_norm.")
        ),
    )


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
    return TokenInputsSpec(vocab_size=vocab_size, size=size, activation=activation)


FAMILY = Family(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    wrapper=("Gemma4ForConditionalGeneration", "gemma4"),
    unread=("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
    parse=_parse,
    reads=("final_logit_softcapping", "use_bidirectional_attention"),
)
