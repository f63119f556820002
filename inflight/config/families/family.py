"""`Family`: how the config.json of one family becomes a `ModelArchitecture`. Below it, the readers that families share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from inflight.config.architecture import (
    DTYPE_BYTES,
    GELU_TANH,
    SILU,
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelArchitecture,
    RopeConfig,
)
from inflight.config.json_fields import JsonFields
from inflight.config.parse_rope import parse_rope
from inflight.config.weight_format import parse_weight_format
from inflight.errors import UnsupportedModelError

# Fields that change the result of models of other families -> the values with which the field changes nothing. A config with
# any other value is refused. (): the field must be absent or null.
_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "partial_rotary_factor": (1, 1.0),
    "use_bidirectional_attention": (False,),
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
_ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH, "gelu_new": GELU_TANH}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models: one file of this folder, and an entry in `families.FAMILIES`.

    `parse` makes the specification. It refuses fields whose value is not supported. `reads` has the names of those fields in
    `_NEUTRAL_VALUES` that `parse` reads itself. `wrapper`: the architecture and the model_type of models that also read
    images; of such a model the part for text is used. `takes`: whether Inflight's own code computes this variant of the family.
    `unread`: see `ModelArchitecture`. In a GGUF file the family's name is
    `gguf_name` (None: no GGUF file of the family is supported). `gguf_interleaves_heads`: llama.cpp's converter changes the
    order of the rows of queries and keys. `gguf_names`: keys of the file, without the family's name, -> the fields of
    config.json with the same values, where only this family has them. `gguf_fields` makes further fields of config.json from
    the keys of the file, of which it reads `gguf_keys`. `gguf_tensors`: names of a layer's tensors in the file -> their names
    in the model, where they are not those of most families.
    """

    architecture: str
    model_type: str
    parse: Callable[[JsonFields], ModelArchitecture]
    reads: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    wrapper: tuple[str, str] | None = None
    takes: Callable[[JsonFields], bool] = lambda fields: True
    gguf_name: str | None = None
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_fields: Callable[[Mapping[str, object]], dict[str, object]] = lambda given: {}
    gguf_keys: tuple[str, ...] = ()
    gguf_tensors: Mapping[str, str] = field(default_factory=dict)
    gguf_interleaves_heads: bool = False

    def from_gguf(self, given: Mapping[str, object]) -> dict[str, object]:
        """The fields of config.json that only this family has, from the keys of a GGUF file."""
        same = {name: given[key] for key, name in self.gguf_names.items() if key in given}
        return same | self.gguf_fields(given)

    def specify(self, fields: JsonFields) -> ModelArchitecture:
        """
        Raises:
            UnsupportedModelError: a field has an impossible value, or a value that would change the result.
        """
        for name, neutral in _NEUTRAL_VALUES.items():
            if name not in self.reads and fields.has(name) and fields.values[name] not in neutral:
                raise UnsupportedModelError(
                    f"config.json: {name}={fields.values[name]!r} is not supported for {self.architecture}; it would change "
                    "the result"
                )
        architecture = self.parse(fields)
        return replace(architecture, name=self.architecture, unread=(*self.unread, *architecture.unread))


def partial_rotation(given: Mapping[str, object]) -> dict[str, object]:
    """The share of each head that is rotated, from the keys of a GGUF file."""
    rotated, head_dim = given.get("rope.dimension_count"), given["attention.key_length"]
    return (
        {"partial_rotary_factor": rotated / head_dim} if isinstance(rotated, int) and isinstance(head_dim, int) else {}
    )


def make_architecture(
    fields: JsonFields, layers: tuple[LayerSpec, ...], *, eps: float = 1e-6, is_tied: bool = False
) -> ModelArchitecture:
    """The specification of a model with these layers. The other fields have the same names in all families. `Family.specify`
    adds the name.

    Args:
        eps: if config.json has no rms_norm_eps, this value is used.
        is_tied: if config.json has no tie_word_embeddings, this value is used.
    """
    return ModelArchitecture(
        name="",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=layers,
        rms_norm_eps=fields.number("rms_norm_eps", eps),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", is_tied),
        dtype=parse_dtype(fields),
        weight_format=parse_weight_format(fields),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def with_residual_scale(
    model: ModelArchitecture, residual: float, *, embedding_scale: float, logits_scale: float
) -> ModelArchitecture:
    """The same model, if every layer adds `residual` * output to the residual stream.

    Instead, the whole stream is divided by `residual`. It is read by norms only, and a norm gives the same result for x / r as
    for x, if its eps is divided by r^2. All other norms keep their eps.
    """
    return replace(
        model,
        embedding_scale=embedding_scale / residual,
        stream_eps=model.rms_norm_eps / residual**2,
        logits_scale=logits_scale,
    )


def read_attention(
    fields: JsonFields,
    *,
    head_dim: int | None = None,
    absent_kv_heads_mean_all: bool = False,
    theta: float = 10000.0,
    partial_rotary_factor: float | None = None,
    has_rope: bool = True,
    reads_bias: bool = False,
) -> AttentionSpec:
    """Heads, rotary embedding and biases, without window.

    Args:
        head_dim: if config.json has no head_dim, this value is used; None: hidden_size / number of heads.
        theta, partial_rotary_factor: see `parse_rope`.
        absent_kv_heads_mean_all: if there is no num_key_value_heads, each query head has its own key head. In most families
            an absent field is an error, because the default of transformers is right for only one model of the family. In all
            families null means num_attention_heads.
        has_rope: False leaves the rotary embedding out, for families that have several (`read_ropes`).
        reads_bias: whether the field attention_bias says that all projections have biases. Otherwise there are none.
    """
    num_heads = fields.integer("num_attention_heads")
    absent_means_all = absent_kv_heads_mean_all or "num_key_value_heads" in fields.values
    num_kv_heads = fields.integer("num_key_value_heads", num_heads if absent_means_all else None)
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"config.json: num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}"
        )
    head_dim = _head_dim(fields, num_heads, head_dim)
    rope = parse_rope(fields, head_dim, theta=theta, partial_rotary_factor=partial_rotary_factor) if has_rope else None
    bias = reads_bias and fields.boolean("attention_bias", False)
    return AttentionSpec(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rope=rope, qkv_bias=bias, output_bias=bias
    )


def _head_dim(fields: JsonFields, num_heads: int, default: int | None) -> int:
    hidden_size = fields.integer("hidden_size")
    if default is None and not fields.has("head_dim"):
        if hidden_size % num_heads:
            raise UnsupportedModelError(
                f"config.json: hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads}, and head_dim is "
                "missing"
            )
        default = hidden_size // num_heads
    head_dim = fields.integer("head_dim", default)
    if head_dim % 2:
        raise UnsupportedModelError(f"config.json: head_dim={head_dim} is odd; rotary embedding needs pairs")
    return head_dim


def read_mlp(
    fields: JsonFields, *, bias: bool = False, is_fused: bool = False, name: str = "hidden_act", default: str = "silu"
) -> MlpSpec:
    """`name`: the field with the name of the activation. If config.json does not have it, the activation is `default`."""
    activation = fields.text(name, default)
    if activation not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"config.json: {name}={activation!r} is not supported; supported are {', '.join(_ACTIVATIONS)}"
        )
    size = fields.integer("intermediate_size")
    return MlpSpec(size=size, bias=bias, activation=_ACTIVATIONS[activation], is_fused=is_fused)


def read_silu_mlp(fields: JsonFields) -> MlpSpec:
    """The MLP of a family whose recurrent layers have the activation SiLU: they read the same field, or no field."""
    mlp = read_mlp(fields)
    if mlp.activation != SILU:
        raise UnsupportedModelError(
            f"{fields.where}: hidden_act={fields.text('hidden_act')!r} is not supported by Inflight's own code, because the "
            "recurrent layers of this family have 'silu'; use model_impl='transformers' (--model-impl transformers)"
        )
    return mlp


def read_cap(fields: JsonFields, name: str, default: float | None) -> float | None:
    """A soft cap. null means no cap. If the field is absent, the cap is `default`."""
    if default is None and not fields.has(name):
        return None
    is_null = name in fields.values and not fields.has(name)
    return None if is_null else fields.number(name, default)


def read_ropes(
    fields: JsonFields, head_dim: int, *, theta: float, local_theta: float, local_name: str | None = None
) -> tuple[RopeConfig, RopeConfig]:
    """The rotary embedding of layers without a window, and of layers with one.

    Transformers 5 writes both as objects in `rope_parameters`. Transformers 4 writes `rope_theta` and `rope_scaling` for layers
    without a window, and the field `local_name` (None: no field) has the theta of layers with one.

    Args:
        theta, local_theta: if config.json has no theta, these values are used.
    """
    both = fields.mapping("rope_parameters")
    if unknown := sorted(set(both.values) - {"full_attention", "sliding_attention"}):
        raise UnsupportedModelError(
            f"{both.where}: {', '.join(unknown)} is not supported; for this family it has an object for full_attention and "
            "one for sliding_attention"
        )
    full, local = both.mapping("full_attention"), both.mapping("sliding_attention")
    full = JsonFields({**full.values, **fields.mapping("rope_scaling").values}, full.where)
    if local_name is not None:
        local_theta = fields.number(local_name, local_theta)
    return (
        parse_rope(fields, head_dim, rope=full, theta=fields.number("rope_theta", theta)),
        parse_rope(fields, head_dim, rope=local, theta=local_theta),
    )


def with_windows(fields: JsonFields, layer: LayerSpec, windows: Iterable[int | None]) -> tuple[LayerSpec, ...]:
    """Copies of `layer`, one per window.

    A window of max_position_embeddings tokens or more hides no token, so it is left out (None). Then the layer can share a
    block table with layers that have no window.
    """
    max_length = fields.integer("max_position_embeddings")
    shorter = (window if window is not None and window < max_length else None for window in windows)
    attention = layer.attention
    assert attention is not None, "a recurrent layer has no window"
    return tuple(replace(layer, attention=replace(attention, window=window)) for window in shorter)


def two_kinds_of_layers(
    fields: JsonFields, layer: LayerSpec, ropes: Sequence[RopeConfig], pattern: int
) -> tuple[LayerSpec, ...]:
    """Copies of `layer`. Those without a window have the first rotary embedding, those with one have the second. If layer_types
    is absent, every `pattern`-th layer has no window."""
    window, num_layers = read_window(fields), fields.integer("num_hidden_layers")
    by_index = [(index + 1) % pattern != 0 for index in range(num_layers)]
    assert layer.attention is not None
    full, local = (replace(layer, attention=replace(layer.attention, rope=rope)) for rope in ropes)
    (local,) = with_windows(fields, local, [window])
    return tuple(local if windowed else full for windowed in read_layer_types(fields, by_index, window))


def read_window(fields: JsonFields, default: int = 4096) -> int | None:
    """The field sliding_window. null means no window. If the field is absent, the window is `default`, as in transformers."""
    null = "sliding_window" in fields.values and not fields.has("sliding_window")
    return None if null else fields.integer("sliding_window", default)


def read_layer_types(fields: JsonFields, default: list[bool], window: int | None) -> list[bool]:
    """Which layers have a window: the field layer_types, or `default` if it is absent."""
    layer_types = fields.texts("layer_types")
    if not layer_types:
        return default
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown or len(layer_types) != len(default):
        raise UnsupportedModelError(
            f"config.json: layer_types={list(layer_types)!r} must have {len(default)} entries, one per layer, and each must "
            "be full_attention or sliding_attention"
        )
    wanted = [kind == "sliding_attention" for kind in layer_types]
    if any(wanted) and window is None:
        raise UnsupportedModelError(
            "config.json: layer_types has sliding_attention, but no window is in use (sliding_window, use_sliding_window)"
        )
    return wanted


def read_recurrent_layers(fields: JsonFields, name: str, default: list[bool]) -> list[bool]:
    """Which layers have attention: the field layer_types, or `default` if it is absent. The others are recurrent and have the
    type `name`."""
    given = fields.texts("layer_types") or tuple("full_attention" if each else name for each in default)
    if set(given) - {name, "full_attention"} or len(given) != len(default) or "full_attention" not in given:
        raise UnsupportedModelError(
            f"{fields.where}: layer_types={list(given)!r} must have {len(default)} entries, one per layer, each must be {name} "
            "or full_attention, and there must be a full_attention"
        )
    return [each == "full_attention" for each in given]


def fixed_layer_types(fields: JsonFields, windowed: list[bool], window: int | None, name: str) -> None:
    """Refuses a field layer_types that differs from `windowed`: transformers' class `name` does not read it."""
    if read_layer_types(fields, windowed, window) != windowed:
        raise UnsupportedModelError(
            f"config.json: layer_types={list(fields.texts('layer_types'))!r} is not supported for {name}"
        )


# Other names of dtypes. Weights in float64 are computed in float32. "auto" names none. `stored_dtype.py` has replaced it, if
# there are weights.
_DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "auto": "float32"} | dict.fromkeys(
    ("fp32", "float", "float64", "double"), "float32"
)


def parse_dtype(fields: JsonFields) -> str:
    """The dtype of the weights, as the file names it; float32 if it names none."""
    dtype = fields.text("dtype", fields.text("torch_dtype", "float32")).lower().removeprefix("torch.")
    dtype = _DTYPE_NAMES.get(dtype, dtype)
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModelError(
            f"config.json: dtype={dtype!r} is not supported; supported are {', '.join(DTYPE_BYTES)}"
        )
    return dtype
