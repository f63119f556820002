"""`ModelArchitecture`: what config.json says about the network, with the same field names for every family of models."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Who computes a model: Inflight's own code, or the code of Hugging Face transformers.
INFLIGHT, TRANSFORMERS = "inflight", "transformers"

# What a norm of queries and keys covers: each head alone, or all heads of a token together.
HEAD, WHOLE = "head", "whole"

SILU, GELU_TANH, SIGMOID = "silu", "gelu_tanh", "sigmoid"

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. `kind` is "default", "linear", "llama3", "yarn", "longrope" or "proportional". Each kind uses
    only some of the fields.

    The first `rotary_dim` dimensions of a head are rotated (None: all), in pairs (i, i + rotary_dim / 2), or (2i, 2i + 1) if
    `interleaved` is set. With a `query_beta` b, the query at position p is also multiplied by 1 + b * log(1 + floor(p /
    original_max_position_embeddings)).

    In yarn and longrope, cos and sin are multiplied by `attention_factor`. In yarn, the correction range is rounded to whole
    dimensions if `truncate` is set. In longrope, each frequency is divided by its factor. `for_length` replaces the `factors`
    by the `long_factors` if requests may have more than `original_max_position_embeddings` tokens. In proportional, the pairs
    are (i, i + head_dim / 2) with the frequencies of a head that is rotated as a whole, but only the first rotary_dim / 2 of
    them are rotated.
    """

    theta: float = 10000.0
    rotary_dim: int | None = None
    interleaved: bool = False
    query_beta: float | None = None
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention (layers/latent_attention.py). A token's keys and values of all heads come from one latent
    vector of `rank` numbers. Beside it, all heads share `rope_dim` rotated elements of the keys. A head's query has `nope_dim`
    elements without rotation and `rope_dim` with; its value has `value_dim`.

    `query_rank`: queries come from a latent vector of so many numbers. None: they come from the layer's input. Latent vectors
    are normed with `eps`, which is not the model's: transformers' models do not read it from config.json.
    """

    rank: int
    query_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    eps: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The attention of a layer.

    `rope`: None if queries and keys are not rotated. `window`: the number of tokens that a query may see, itself included;
    None: it may see all tokens before it. `scale` multiplies the scores; None: it is 1 / sqrt(head_dim). `soft_cap` c: a score
    s becomes c * tanh(s / c). `qk_norm`: what a norm of queries and of keys covers: HEAD, WHOLE (all heads together), or None.
    `is_fused`: the checkpoint has one tensor `qkv_proj` for queries, keys and values. `has_gate`: the output of each query head
    is multiplied by sigmoid(gate). The checkpoint's `q_proj` has the gates of each head behind its queries. `has_value_norm`:
    values get an RMSNorm without weights. `values_are_keys`: values are the keys before their norm and rotation. `kv_layer`:
    the layer has no keys and values of its own, it reads those of this layer.

    With `latent`, the cache has one row for each token, which all heads read: the latent vector, then the rotated elements.
    Then `num_kv_heads` is 1, `head_dim` is the size of this row, and `rope` rotates `latent.rope_dim` elements.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: str | None = None
    is_fused: bool = False
    has_gate: bool = False
    has_value_norm: bool = False
    values_are_keys: bool = False
    kv_layer: int | None = None
    latent: LatentSpec | None = None

    @property
    def rotated_dim(self) -> int:
        """The size of what `rope` rotates, or rotates a part of."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def num_features(self) -> int:
        """The output features of the input projections, and the input features of the output projection. Times the hidden size,
        this is the number of their weights."""
        if (latent := self.latent) is not None:
            queries = latent.query_rank or self.num_heads * (latent.nope_dim + latent.rope_dim)
            return queries + latent.rank + latent.rope_dim + self.num_heads * latent.value_dim
        num_new = 0 if self.kv_layer is not None else 2 * self.num_kv_heads
        return ((3 if self.has_gate else 2) * self.num_heads + num_new) * self.head_dim

    def fits(self, tp_size: int) -> bool:
        """Whether the heads can be divided among `tp_size` ranks. If there are fewer key/value heads than ranks, several ranks
        hold a copy of each key/value head."""
        num_kv_heads = self.num_kv_heads
        return self.num_heads % tp_size == 0 and (num_kv_heads % tp_size == 0 or tp_size % num_kv_heads == 0)

    def __str__(self) -> str:
        return f"{self.num_heads} query heads, {self.num_kv_heads} key/value heads"


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec:
    """A recurrent layer with the gated delta rule (kernels/gated_delta.py). `kernel_size`: the tokens that its convolution
    covers. `is_grouped`: in the checkpoint, the rows of the projections are grouped by key heads."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    is_grouped: bool = False

    @property
    def num_features(self) -> int:
        """See `AttentionSpec.num_features`."""
        return self._num_channels + 2 * self.num_value_heads * (self.value_dim + 1)

    @property
    def _num_channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def state_bytes(self, itemsize: int, tp_size: int) -> int:
        """What a rank keeps of a sequence, if the model's dtype has `itemsize` bytes."""
        matrices = self.num_value_heads // tp_size * self.key_dim * self.value_dim
        return 4 * matrices + (self.kernel_size - 1) * self._num_channels // tp_size * itemsize

    def fits(self, tp_size: int) -> bool:
        """See `AttentionSpec.fits`."""
        return self.num_key_heads % tp_size == 0

    def __str__(self) -> str:
        return f"{self.num_key_heads} key heads of its recurrent layers"


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec:
    """A recurrent layer that is a short convolution (kernels/short_conv.py), which covers `kernel_size` tokens."""

    num_channels: int
    kernel_size: int
    bias: bool = False

    @property
    def num_features(self) -> int:
        """See `AttentionSpec.num_features`."""
        return 4 * self.num_channels

    def state_bytes(self, itemsize: int, tp_size: int) -> int:
        """See `GatedDeltaSpec.state_bytes`."""
        return (self.kernel_size - 1) * self.num_channels // tp_size * itemsize

    def fits(self, tp_size: int) -> bool:
        """See `AttentionSpec.fits`."""
        return self.num_channels % tp_size == 0

    def __str__(self) -> str:
        return f"{self.num_channels} channels of its convolutions"


RecurrenceSpec = GatedDeltaSpec | ShortConvSpec


@dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """The gated MLP of a layer: down(activation(gate(x)) * up(x)). `size` is the number of outputs of gate and of up.

    `activation` is SILU or GELU_TANH. `is_fused`: the checkpoint has one tensor `gate_up_proj` for gate and up.
    """

    size: int
    bias: bool = False
    activation: str = SILU
    is_fused: bool = False


@dataclass(frozen=True, kw_only=True)
class NormNames:
    """Where a layer has norms, and their names in the checkpoint. None: there is no norm at this place.

    A norm `before` covers the input of the attention or of the MLP. A norm `after` covers its output, before the output is
    added to the residual stream.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder layer. Layers with equal specifications are of one kind. A layer has `attention`, or a recurrence:
    `gated_delta` or `short_conv`.

    `has_scalar`: the layer's result is multiplied by a number of the checkpoint, `layer_scalar`.
    """

    attention: AttentionSpec | None = None
    gated_delta: GatedDeltaSpec | None = None
    short_conv: ShortConvSpec | None = None
    mlp: MlpSpec
    norms: NormNames = NormNames()
    has_scalar: bool = False

    @property
    def recurrence(self) -> RecurrenceSpec | None:
        return self.gated_delta or self.short_conv

    @property
    def mixer(self) -> AttentionSpec | RecurrenceSpec:
        """What brings the tokens of a sequence together."""
        mixer = self.attention or self.recurrence
        assert mixer is not None
        return mixer


@dataclass(frozen=True, kw_only=True)
class TokenInputsSpec:
    """Each layer gets a vector of `size` numbers for each token, which depends on the token's id and on its embedding
    (layers/token_inputs.py). `activation` is that of its gate."""

    vocab_size: int
    size: int
    activation: str


@dataclass(frozen=True, kw_only=True)
class ModelArchitecture:
    """A decoder-only transformer.

    `name` is the class name in config.json's "architectures". The same code computes all families (`models/decoder.py`): it
    reads `layers`, which has one entry per layer. `weight_format` says how the linear weights are stored, by a name in
    `weight_format.py`.

    Norms add `rms_norm_eps` to the mean square of their input. Those that read the residual stream add `stream_eps`, unless it
    is None.

    Embeddings are multiplied by `embedding_scale`, which is first rounded to the model's dtype if `rounds_embedding_scale` is
    set. Logits l become `logits_scale * l`, and then c * tanh(l / c) if there is a `logits_cap` c. `norm_offset` is added to
    the weights of all norms but those of recurrent layers. The checkpoint may have tensors that are for other uses, such as
    images or drafts: their names begin with one of `unread`. `renames` has parts of names in the family's checkpoints, and what
    replaces them in the names that the loader sees.

    If `implementation` is TRANSFORMERS, only the sizes, `dtype`, `weight_format` and `eos_token_ids` are known, and `head_dim`
    is an estimate. The model's constructor finds out everything else. `not_native` says then why Inflight's own code does not
    compute the model, if it knows the family.
    """

    name: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    stream_eps: float | None = None
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    logits_scale: float = 1.0
    logits_cap: float | None = None
    token_inputs: TokenInputsSpec | None = None
    norm_offset: float = 0.0
    dtype: str = "float32"
    weight_format: str = "plain"
    unread: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    implementation: str = INFLIGHT
    not_native: str = ""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> list[AttentionSpec]:
        """The specifications of the layers with attention, in their order."""
        return [layer.attention for layer in self.layers if layer.attention is not None]

    @property
    def recurrences(self) -> list[RecurrenceSpec]:
        """The specifications of the recurrent layers, in their order."""
        return [layer.recurrence for layer in self.layers if layer.recurrence is not None]

    @property
    def caching(self) -> list[AttentionSpec]:
        """The specifications of the layers that have keys and values of their own."""
        return [attention for attention in self.attentions if attention.kv_layer is None]

    @property
    def head_dims(self) -> list[int]:
        """The sizes of heads in the cache, in the order of the first layers that have them."""
        latent = [attention.latent.rank for attention in self.attentions if attention.latent is not None]
        return list(dict.fromkeys([*(attention.head_dim for attention in self.attentions), *latent]))

    @property
    def default_max_model_len(self) -> int:
        """The longest request, if the user does not choose it. With longrope, it is the length up to which `factors` hold."""
        ropes = [attention.rope for attention in self.attentions]
        lengths = [rope.original_max_position_embeddings for rope in ropes if rope is not None and rope.long_factors]
        return min([self.max_position_embeddings, *lengths])

    def for_length(self, max_model_len: int) -> ModelArchitecture:
        """The same model for requests of up to `max_model_len` tokens."""
        return replace(self, layers=tuple(_for_length(layer, max_model_len) for layer in self.layers))


def _for_length(layer: LayerSpec, max_model_len: int) -> LayerSpec:
    attention = layer.attention
    if attention is None or (rope := attention.rope) is None or not rope.long_factors:
        return layer
    if max_model_len <= rope.original_max_position_embeddings:
        return layer
    return replace(layer, attention=replace(attention, rope=replace(rope, factors=rope.long_factors)))
