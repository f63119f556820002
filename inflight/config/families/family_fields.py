"""`FamilyFields`: a config.json, with readers for those parts of a model that several families describe in the same way."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from inflight.config.architecture import (
    DTYPE_BYTES,
    GELU_TANH,
    SILU,
    GatedMlpSpec,
    LayerSpec,
    MlpSpec,
    ModelArchitecture,
)
from inflight.config.json_fields import JsonFields
from inflight.config.mixers import AttentionSpec, MixerSpec, RopeConfig
from inflight.config.parse_rope import parse_rope
from inflight.config.weight_format import parse_weight_blocks, parse_weight_format

_ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH, "gelu_new": GELU_TANH}
# Other names of dtypes. Weights in float64 are computed in float32. "auto" names none. `stored_dtype.py` has replaced it, if
# there are weights.
_DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "auto": "float32"} | dict.fromkeys(
    ("fp32", "float", "float64", "double"), "float32"
)


@dataclass(frozen=True)
class FamilyFields(JsonFields):
    """The fields of a model's config.json, with methods that read parts of the network.

    Raises (all methods):
        UnsupportedModelError: a field has an impossible value, or a value that Inflight's own code does not support.
    """

    @property
    def num_layers(self) -> int:
        return self.integer("num_hidden_layers")

    def architecture(
        self, layers: tuple[LayerSpec, ...], *, eps: float = 1e-6, is_tied: bool = False
    ) -> ModelArchitecture:
        """The specification of a model with these layers. The other fields have the same names in all families.
        `Family.specify` adds the name.

        Args:
            eps: if config.json has no rms_norm_eps, this value is used.
            is_tied: if config.json has no tie_word_embeddings, this value is used.
        """
        return ModelArchitecture(
            name="",
            vocab_size=self.integer("vocab_size"),
            hidden_size=self.integer("hidden_size"),
            layers=layers,
            rms_norm_eps=self.number("rms_norm_eps", eps),
            max_position_embeddings=self.integer("max_position_embeddings"),
            tie_word_embeddings=self.boolean("tie_word_embeddings", is_tied),
            dtype=parse_dtype(self),
            weight_format=parse_weight_format(self),
            weight_blocks=parse_weight_blocks(self),
            eos_token_ids=self.token_ids("eos_token_id"),
        )

    def attention(
        self,
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
            absent_kv_heads_mean_all: if there is no num_key_value_heads, each query head has its own key head. In most
                families an absent field is an error, because the default of transformers is right for only one model of the
                family. In all families null means num_attention_heads.
            has_rope: False leaves the rotary embedding out, for families that have several (`ropes`).
            reads_bias: whether the field attention_bias says that all projections have biases. Otherwise there are none.
        """
        num_heads = self.integer("num_attention_heads")
        absent_means_all = absent_kv_heads_mean_all or "num_key_value_heads" in self.values
        num_kv_heads = self.integer("num_key_value_heads", num_heads if absent_means_all else None)
        if num_heads % num_kv_heads:
            raise self.refusal(
                f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}"
            )
        head_dim = self._head_dim(num_heads, head_dim)
        rope = (
            parse_rope(self, head_dim, theta=theta, partial_rotary_factor=partial_rotary_factor) if has_rope else None
        )
        bias = reads_bias and self.boolean("attention_bias", False)
        return AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=rope,
            qkv_bias=bias,
            output_bias=bias,
        )

    def _head_dim(self, num_heads: int, default: int | None) -> int:
        hidden_size = self.integer("hidden_size")
        if default is None and not self.has("head_dim"):
            if hidden_size % num_heads:
                raise self.refusal(
                    f"hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads}, and "
                    "head_dim is missing"
                )
            default = hidden_size // num_heads
        head_dim = self.integer("head_dim", default)
        if head_dim % 2:
            raise self.refusal(f"head_dim={head_dim} is odd; rotary embedding needs pairs")
        return head_dim

    def mlp(
        self, *, bias: bool = False, is_fused: bool = False, name: str = "hidden_act", default: str = "silu"
    ) -> GatedMlpSpec:
        """`name`: the field with the name of the activation. If config.json does not have it, the activation is `default`."""
        activation = self.activation(name, default)
        size = self.integer("intermediate_size")
        return GatedMlpSpec(size=size, bias=bias, activation=activation, is_fused=is_fused)

    def activation(self, name: str, default: str = "silu") -> str:
        """See `mlp`."""
        activation = self.text(name, default)
        if activation not in _ACTIVATIONS:
            raise self.refusal(f"{name}={activation!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[activation]

    def silu_mlp(self) -> GatedMlpSpec:
        """The MLP of a family whose recurrent layers have the activation SiLU: they read the same field, or no field."""
        self.require_silu()
        return self.mlp()

    def require_silu(self) -> None:
        """See `silu_mlp`."""
        if self.activation("hidden_act") != SILU:
            raise self.refusal(
                f"hidden_act={self.text('hidden_act')!r} is not supported by Inflight's own code, because the "
                "recurrent layers of this family have 'silu'; use model_impl='transformers' (--model-impl transformers)"
            )

    def soft_cap(self, name: str, default: float | None) -> float | None:
        """A soft cap. null means no cap. If the field is absent, the cap is `default`."""
        if self.is_null(name) or (default is None and not self.has(name)):
            return None
        return self.number(name, default)

    def ropes(
        self, head_dim: int, *, theta: float, local_theta: float, local_name: str | None = None
    ) -> tuple[RopeConfig, RopeConfig]:
        """The rotary embedding of layers without a window, and of layers with one.

        Transformers 5 writes both as objects in `rope_parameters`. Transformers 4 writes `rope_theta` and `rope_scaling` for
        layers without a window, and the field `local_name` (None: no field) has the theta of layers with one.

        Args:
            theta, local_theta: if config.json has no theta, these values are used.
        """
        both = self.mapping("rope_parameters")
        if unknown := sorted(set(both.values) - {"full_attention", "sliding_attention"}):
            raise both.refusal(
                f"{', '.join(unknown)} is not supported; for this family it has an object for full_attention "
                "and one for sliding_attention"
            )
        full = both.mapping("full_attention")
        local = both.mapping("sliding_attention")
        full = full.with_values(self.mapping("rope_scaling").values)
        if local_name is not None:
            local_theta = self.number(local_name, local_theta)
        return (
            parse_rope(self, head_dim, rope=full, theta=self.number("rope_theta", theta)),
            parse_rope(self, head_dim, rope=local, theta=local_theta),
        )

    # -- which layers have a window, and which are recurrent -----------------------------------------------------------

    def window(self, default: int = 4096) -> int | None:
        """The field sliding_window. null means no window. If the field is absent, it is `default`, as in transformers."""
        if self.is_null("sliding_window"):
            return None
        return self.integer("sliding_window", default)

    def which_have_window(self, default: list[bool], window: int | None) -> list[bool]:
        """Which layers have a window: the field layer_types, or `default` if it is absent."""
        layer_types = self.texts("layer_types")
        if not layer_types:
            return default
        unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
        if unknown or len(layer_types) != len(default):
            raise self.refusal(
                f"layer_types={list(layer_types)!r} must have {len(default)} entries, one per layer, and each "
                "must be full_attention or sliding_attention"
            )
        wanted = [kind == "sliding_attention" for kind in layer_types]
        if any(wanted) and window is None:
            raise self.refusal(
                "layer_types has sliding_attention, but no window is in use (sliding_window, use_sliding_window)"
            )
        return wanted

    def windows(self, default: list[bool], window: int | None) -> list[int | None]:
        """The window of each layer; `default` as in `which_have_window`."""
        return [window if windowed else None for windowed in self.which_have_window(default, window)]

    def refuse_other_windows(self, windowed: list[bool], window: int | None, name: str) -> None:
        """Refuses a field layer_types that differs from `windowed`: transformers' class `name` does not read it."""
        if self.which_have_window(windowed, window) != windowed:
            raise self.impossible(f"layer_types={list(self.texts('layer_types'))!r} is not supported for {name}")

    def layers_with_windows(self, layer: LayerSpec, windows: Iterable[int | None]) -> tuple[LayerSpec, ...]:
        """Copies of `layer`, one per window.

        A window of max_position_embeddings tokens or more hides no token, so it is left out (None). Then the layer can share
        a block table with layers that have no window.
        """
        attention = layer.mixer
        assert isinstance(attention, AttentionSpec), "other layers have no window"
        return tuple(replace(layer, mixer=mixer) for mixer in self.mixers_with_windows(attention, windows))

    def mixers_with_windows(self, attention: AttentionSpec, windows: Iterable[int | None]) -> list[AttentionSpec]:
        """The attention of `layers_with_windows`."""
        max_length = self.integer("max_position_embeddings")
        shorter = (window if window is not None and window < max_length else None for window in windows)
        return [replace(attention, window=window) for window in shorter]

    def two_kinds_of_layers(self, layer: LayerSpec, ropes: Sequence[RopeConfig], pattern: int) -> tuple[LayerSpec, ...]:
        """Copies of `layer`. Those without a window have the first rotary embedding, those with one have the second. If
        layer_types is absent, every `pattern`-th layer has no window."""
        window = self.window()
        by_index = [(index + 1) % pattern != 0 for index in range(self.num_layers)]
        assert layer.attention is not None
        full, local = (replace(layer, mixer=replace(layer.attention, rope=rope)) for rope in ropes)
        (local,) = self.layers_with_windows(local, [window])
        return tuple(local if windowed else full for windowed in self.which_have_window(by_index, window))

    def which_have_attention(self, name: str, default: list[bool]) -> list[bool]:
        """Which layers have attention: the field layer_types, or `default` if it is absent. The others are recurrent and have
        the type `name`."""
        given = self.texts("layer_types") or tuple("full_attention" if each else name for each in default)
        if set(given) - {name, "full_attention"} or len(given) != len(default) or "full_attention" not in given:
            raise self.refusal(
                f"layer_types={list(given)!r} must have {len(default)} entries, one per layer, each must be "
                f"{name} or full_attention, and there must be a full_attention"
            )
        return [each == "full_attention" for each in given]


def layers_with(mixers: Iterable[MixerSpec], mlp: MlpSpec) -> tuple[LayerSpec, ...]:
    """A layer for each mixer."""
    return tuple(LayerSpec(mixer=mixer, mlp=mlp) for mixer in mixers)


def parse_dtype(fields: JsonFields) -> str:
    """The dtype of the weights, as the file names it; float32 if it names none."""
    dtype = fields.text("dtype", fields.text("torch_dtype", "float32")).lower().removeprefix("torch.")
    dtype = _DTYPE_NAMES.get(dtype, dtype)
    if dtype not in DTYPE_BYTES:
        raise fields.refusal(f"dtype={dtype!r} is not supported; supported are {', '.join(DTYPE_BYTES)}")
    return dtype
