"""`parse_architecture`: config.json -> `ModelArchitecture`. It refuses unsupported fields that would change the result.

The reference is Hugging Face transformers. Fields that do not change the result there are ignored. A field of another family
that would change the result in that family (`_NEUTRAL_VALUES`) is refused, even if transformers ignores it in this one. A
missing size is an error (exceptions have a comment). Other missing fields have the default value of transformers' config class.
"""

from __future__ import annotations

from collections.abc import Mapping

from inflight.config.architecture import DTYPE_BYTES, ModelArchitecture
from inflight.config.json_fields import JsonFields
from inflight.config.parse_rope import parse_rope
from inflight.config.weight_format import parse_weight_format
from inflight.errors import UnsupportedModelError

# model_type -> architecture. Needed for a config that was saved without weights, because it has no "architectures".
_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SUPPORTED_ARCHITECTURES = tuple(_MODEL_TYPES.values())

# Fields that change the result of models of other families -> the values with which the field changes nothing. A config with
# any other value is refused. (): the field must be absent or null.
_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "partial_rotary_factor": (1, 1.0),
    "attention_multiplier": (),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "logit_scale": (1, 1.0),
    "scale_emb": (1, 1.0),
    "scale_depth": (),
    "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_softcap": (),
    "logits_soft_cap": (),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "clip_qkv": (),
    "alibi": (False,),
    "no_rope_layers": ([],),
    "attention_chunk_size": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "is_encoder_decoder": (False,),
    "quantization": (),
    "compression_config": (),
}
_ACTIVATIONS = ("silu", "swish")  # two names of one function


def parse_architecture(config: Mapping[str, object]) -> ModelArchitecture:
    """The network that a parsed config.json describes.

    Raises:
        UnsupportedModelError: the family or its variant is not supported, or a field has an impossible value.
    """
    fields = JsonFields(config)
    name = _architecture_name(fields)
    _refuse_unserved_variants(fields, name)
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = _num_kv_heads(fields, name, num_heads)
    num_layers = fields.integer("num_hidden_layers")
    max_position_embeddings = fields.integer("max_position_embeddings")
    attention_bias = name in ("LlamaForCausalLM", "Qwen3ForCausalLM") and fields.boolean("attention_bias", False)
    return ModelArchitecture(
        name=name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(fields, name, num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=parse_rope(fields, max_position_embeddings),
        max_position_embeddings=max_position_embeddings,
        sliding_windows=_sliding_windows(fields, name, num_layers, max_position_embeddings),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=attention_bias or name == "Qwen2ForCausalLM",
        output_bias=attention_bias,
        mlp_bias=name == "LlamaForCausalLM" and fields.boolean("mlp_bias", False),
        qk_norm=name == "Qwen3ForCausalLM",
        dtype=parse_dtype(fields),
        weight_format=parse_weight_format(fields),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def is_known_family(config: Mapping[str, object]) -> bool:
    """Whether Inflight's own code supports the model's family. `parse_architecture` may still refuse this variant of it."""
    return any(name in SUPPORTED_ARCHITECTURES for name in _architecture_names(JsonFields(config)))


def _architecture_names(fields: JsonFields) -> tuple[str, ...]:
    model_type = fields.text("model_type", "unknown")
    return fields.texts("architectures") or (_MODEL_TYPES.get(model_type, f"model_type {model_type}"),)


def _architecture_name(fields: JsonFields) -> str:
    names = _architecture_names(fields)
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return name
    raise UnsupportedModelError(
        f"config.json: {', '.join(names)} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _refuse_unserved_variants(fields: JsonFields, name: str) -> None:
    for field, neutral in _NEUTRAL_VALUES.items():
        if fields.has(field) and fields.values[field] not in neutral:
            raise UnsupportedModelError(
                f"config.json: {field}={fields.values[field]!r} is not supported for {name}; it would change the result"
            )
    activation = fields.text("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"config.json: hidden_act={activation!r} is not supported; supported are {', '.join(_ACTIVATIONS)}"
        )


def _num_kv_heads(fields: JsonFields, name: str, num_heads: int) -> int:
    # The configs of the first Llama models lack this field: these models have num_heads key/value heads. In other families an
    # absent field is an error, because the default of transformers is right for only one model of the family. In all families
    # null means num_heads.
    absent_means_all = name == "LlamaForCausalLM" or "num_key_value_heads" in fields.values
    num_kv_heads = fields.integer("num_key_value_heads", num_heads if absent_means_all else None)
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"config.json: num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}"
        )
    return num_kv_heads


def _head_dim(fields: JsonFields, name: str, num_heads: int) -> int:
    if name == "Qwen3ForCausalLM":
        head_dim = fields.integer("head_dim", 128)
    elif fields.has("head_dim"):
        head_dim = fields.integer("head_dim")
    elif fields.integer("hidden_size") % num_heads:
        raise UnsupportedModelError(
            f"config.json: hidden_size={fields.integer('hidden_size')} is not a multiple of num_attention_heads="
            f"{num_heads}, and head_dim is missing"
        )
    else:
        head_dim = fields.integer("hidden_size") // num_heads
    if head_dim % 2:
        raise UnsupportedModelError(f"config.json: head_dim={head_dim} is odd; rotary embedding needs pairs")
    return head_dim


def _sliding_windows(fields: JsonFields, name: str, num_layers: int, max_length: int) -> tuple[int | None, ...]:
    """The window of each layer, in tokens; None: the layer has no window.

    A window of `max_length` tokens or more hides no token, so it is left out (None). Then the layer can share a block table
    with layers that have no window.
    """
    if name == "LlamaForCausalLM":
        window, windowed = None, [False] * num_layers
    elif name == "MistralForCausalLM":
        window = _window(fields)
        windowed = [window is not None] * num_layers
    else:
        window = _window(fields) if fields.boolean("use_sliding_window", False) else None
        first = fields.values.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int):
            raise UnsupportedModelError(f"config.json: max_window_layers={first!r} is not an integer")
        windowed = [window is not None and layer >= first for layer in range(num_layers)]
    layer_types = fields.texts("layer_types")
    if layer_types:
        windowed = _check_layer_types(layer_types, windowed, window, name)
    effective = window if window is not None and window < max_length else None
    return tuple(effective if is_windowed else None for is_windowed in windowed)


def _window(fields: JsonFields) -> int | None:
    """The field sliding_window. null means no window. If the field is absent, the window is 4096, as in transformers."""
    null = "sliding_window" in fields.values and not fields.has("sliding_window")
    return None if null else fields.integer("sliding_window", 4096)


def _check_layer_types(layer_types: tuple[str, ...], windowed: list[bool], window: int | None, name: str) -> list[bool]:
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown or len(layer_types) != len(windowed):
        raise UnsupportedModelError(
            f"config.json: layer_types={list(layer_types)!r} must have {len(windowed)} entries, one per layer, and each must "
            "be full_attention or sliding_attention"
        )
    wanted = [kind == "sliding_attention" for kind in layer_types]
    if any(wanted) and window is None:
        raise UnsupportedModelError("config.json: layer_types has sliding_attention, but no sliding_window is in use")
    if wanted != windowed and name in ("LlamaForCausalLM", "MistralForCausalLM"):
        raise UnsupportedModelError(f"config.json: layer_types={list(layer_types)!r} is not supported for {name}")
    return wanted


def parse_dtype(fields: JsonFields) -> str:
    """The dtype of the weights, as the file names it; float32 if it names none."""
    dtype = fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModelError(
            f"config.json: dtype={dtype!r} is not supported; supported are {', '.join(DTYPE_BYTES)}"
        )
    return dtype
