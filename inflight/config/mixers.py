"""`MixerSpec`: what brings the tokens of a sequence together in a layer, a class for each kind: attention, recurrent layers.

To add a kind, see docs/extending.md.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

# What a norm of queries and keys covers: each head alone, or all heads of a token together. ROTATED_HEAD: each head alone,
# after its rotation.
HEAD = "head"
WHOLE = "whole"
ROTATED_HEAD = "rotated_head"


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

    With `mrope_section`, a token may have three positions: frame, row and column. So many frequencies are multiplied by each of
    them: first those of the frame, then of the row, then of the column; or, if `mrope_interleaved` is set, the three take turns
    (layers/mrope.py).
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
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False


class MixerSpec(ABC):
    """What brings the tokens of a sequence together in a layer. `MIXER_KINDS` has all subclasses, and models/layer_kinds.py has
    the layer of each. Code that plans asks the specification, and does not know its class.

    Attributes:
        kind: the name of the subclass in messages between processes.
        kv_layer: the layer has no keys and values of its own, it reads those of this layer.
        reads: fields of config.json that change the result of most families' models, and that this kind takes into account.
        only_on_cpu: what to say, behind the name of the model, if the layer would be on a GPU. "": it may be there.
        by_transformers_on_gpu: whether transformers' code computes a model with such a layer on GPUs, if our own does not,
            because of `only_on_cpu` of this layer or of another one.
        depends_on_chunks: whether results depend on how the scheduler has cut a prompt into pieces.
    """

    kind: str
    kv_layer: int | None = None
    reads: ClassVar[tuple[str, ...]] = ()
    by_transformers_on_gpu: ClassVar[bool] = False
    depends_on_chunks: ClassVar[bool] = False

    @property
    def only_on_cpu(self) -> str:
        return ""

    @property
    @abstractmethod
    def num_features(self) -> int:
        """The output features of the input projections, and the input features of the output projection. Times the hidden size,
        this is the number of their weights."""

    @abstractmethod
    def fits(self, tp_size: int) -> bool:
        """Whether the layer can be divided among `tp_size` ranks."""

    @abstractmethod
    def __str__(self) -> str:
        """What is divided among ranks, for an error text."""

    @property
    def rotation(self) -> tuple[RopeConfig | None, int] | None:
        """The rotary embedding of the layer, and the size of what it rotates or rotates a part of. None: it needs none."""
        return None

    @property
    def head_products(self) -> frozenset[int]:
        """The input features of products that the layer computes for each head, beside its linear layers."""
        return frozenset()


@dataclass(frozen=True, kw_only=True)
class BaseAttentionSpec(MixerSpec):
    """What all kinds of attention have: for each token of a sequence they keep a row of each key/value head in the cache.

    `head_dim`: the size of such a row. `rope`: None if queries and keys are not rotated. `window`: the number of tokens that a
    query may see, itself included; None: it may see all tokens before it. `scale` multiplies the scores; None: it is 1 /
    sqrt(head_dim). If `is_causal` is not set, a query also sees the tokens behind it, with a window those that are less than
    `window` tokens away. All tokens of a sequence must then be computed in one step. If the model reads images and
    `sees_whole_images` is set, the query of an image's token also sees the tokens behind it, up to the end of the image,
    whatever the window is. All tokens of an image must then be computed in one step.
    """

    keeps_values: ClassVar[bool] = True  # whether the cache has rows of values beside those of keys

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    window: int | None = None
    is_causal: bool = True
    sees_whole_images: bool = False
    scale: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False

    @property
    def rotation(self) -> tuple[RopeConfig | None, int]:
        return self.rope, self.head_dim

    @property
    def cached_sizes(self) -> tuple[int, ...]:
        """The sizes of keys, and of values if they are others."""
        return (self.head_dim,)

    def token_bytes(self, itemsize: int, scale_bytes: int, tp_size: int) -> int:
        """What a rank keeps of a token, if a number has `itemsize` bytes and each row has `scale_bytes` more."""
        num_rows = (2 if self.keeps_values else 1) * max(1, self.num_kv_heads // tp_size)
        return num_rows * (self.head_dim * itemsize + scale_bytes)

    def fits(self, tp_size: int) -> bool:
        """If there are fewer key/value heads than ranks, several ranks hold a copy of each key/value head."""
        num_kv_heads = self.num_kv_heads
        return self.num_heads % tp_size == 0 and (num_kv_heads % tp_size == 0 or tp_size % num_kv_heads == 0)

    def __str__(self) -> str:
        return f"{self.num_heads} query heads, {self.num_kv_heads} key/value heads"


@dataclass(frozen=True, kw_only=True)
class PositionBiasSpec:
    """A learned number for each head and each bucket of distances between query and key, which is added to the score. All
    layers have the same. Half of the buckets are for keys behind the query. From `max_distance` on, distances share the last
    bucket (arXiv:1910.10683, section 2.1).

    Attributes:
        name: of the table in the checkpoint, [num_buckets, num_heads].
        radius: the distance up to which the layer has a number for each distance.
    """

    name: str
    num_buckets: int
    max_distance: int
    radius: int


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(BaseAttentionSpec):
    """Attention with keys and values of each key/value head.

    `soft_cap` c: a score s becomes c * tanh(s / c). `qk_norm`: what a norm of queries and of keys covers: HEAD, WHOLE,
    ROTATED_HEAD, or None. `is_fused`: the checkpoint has one tensor `qkv_proj` for queries, keys and values. `has_gate`: the
    output of each query head is multiplied by sigmoid(gate). The checkpoint's `q_proj` has the gates of each head behind its
    queries. `has_value_norm`: values get an RMSNorm without weights. `values_are_keys`: values are the keys before their norm
    and rotation. `has_sinks`: each query head has one more logit in its softmax, which belongs to no key and has no value.
    `position_bias`: what the distance between query and key adds to a score.
    """

    kind: Literal["attention"] = "attention"
    soft_cap: float | None = None
    qk_norm: str | None = None
    is_fused: bool = False
    has_gate: bool = False
    has_value_norm: bool = False
    values_are_keys: bool = False
    has_sinks: bool = False
    kv_layer: int | None = None
    position_bias: PositionBiasSpec | None = None

    @property
    def only_on_cpu(self) -> str:
        if self.position_bias is None:
            return ""
        return "attention with a bias of positions, which runs on CPUs only so far; use device='cpu'"

    @property
    def num_features(self) -> int:
        num_new = 0 if self.kv_layer is not None else 2 * self.num_kv_heads
        return ((3 if self.has_gate else 2) * self.num_heads + num_new) * self.head_dim


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec(BaseAttentionSpec):
    """Multi-head latent attention (layers/latent_attention.py). A token's keys and values of all heads come from one latent
    vector of `rank` numbers. Beside it, all heads share `rope_dim` rotated elements of the keys. A head's query has `nope_dim`
    elements without rotation and `rope_dim` with; its value has `value_dim`. The cache has one row for each token, which all
    heads read: the latent vector, then the rotated elements. So `num_kv_heads` is 1, and `head_dim` is the size of this row.

    `query_rank`: queries come from a latent vector of so many numbers. None: they come from the layer's input. Latent vectors
    are normed with `eps`, which is not the model's: transformers' models do not read it from config.json.
    """

    only_on_cpu = "latent attention, which runs on CPUs only so far; use device='cpu', or model_impl='transformers'"
    by_transformers_on_gpu = True
    keeps_values = False

    kind: Literal["latent_attention"] = "latent_attention"
    num_kv_heads: int = 1
    rank: int
    query_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    eps: float = 1e-6

    @property
    def rotation(self) -> tuple[RopeConfig | None, int]:
        return self.rope, self.rope_dim

    @property
    def cached_sizes(self) -> tuple[int, ...]:
        return self.head_dim, self.rank

    @property
    def head_products(self) -> frozenset[int]:
        return frozenset((self.nope_dim, self.rank))

    @property
    def num_features(self) -> int:
        queries = self.query_rank or self.num_heads * (self.nope_dim + self.rope_dim)
        return queries + self.rank + self.rope_dim + self.num_heads * self.value_dim


@dataclass(frozen=True, kw_only=True)
class RecurrenceSpec(MixerSpec):
    """A layer that keeps a state of each sequence, of the same size for any number of tokens. `kernel_size`: the tokens that
    its convolution covers."""

    only_on_cpu = "recurrent layers, which run on CPUs only so far; use device='cpu'"

    kernel_size: int

    @abstractmethod
    def state_bytes(self, itemsize: int, tp_size: int) -> int:
        """What a rank keeps of a sequence, if the model's dtype has `itemsize` bytes."""


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec(RecurrenceSpec):
    """A recurrent layer with the gated delta rule (kernels/gated_delta.py). `is_grouped`: in the checkpoint, the rows of the
    projections are grouped by key heads."""

    depends_on_chunks = True

    kind: Literal["gated_delta"] = "gated_delta"
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    is_grouped: bool = False

    @property
    def num_features(self) -> int:
        return self._num_channels + 2 * self.num_value_heads * (self.value_dim + 1)

    @property
    def _num_channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def state_bytes(self, itemsize: int, tp_size: int) -> int:
        matrices = self.num_value_heads // tp_size * self.key_dim * self.value_dim
        return 4 * matrices + (self.kernel_size - 1) * self._num_channels // tp_size * itemsize

    def fits(self, tp_size: int) -> bool:
        return self.num_key_heads % tp_size == 0

    def __str__(self) -> str:
        return f"{self.num_key_heads} key heads of its recurrent layers"


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec(RecurrenceSpec):
    """A recurrent layer that is a short convolution (kernels/short_conv.py)."""

    kind: Literal["short_conv"] = "short_conv"
    num_channels: int
    bias: bool = False

    @property
    def num_features(self) -> int:
        return 4 * self.num_channels

    def state_bytes(self, itemsize: int, tp_size: int) -> int:
        return (self.kernel_size - 1) * self.num_channels // tp_size * itemsize

    def fits(self, tp_size: int) -> bool:
        return self.num_channels % tp_size == 0

    def __str__(self) -> str:
        return f"{self.num_channels} channels of its convolutions"


# kind -> specification: what a message may have as `LayerSpec.mixer` (interface/codec.py)
MIXER_KINDS: dict[str, type[MixerSpec]] = {
    each.kind: each for each in (AttentionSpec, LatentAttentionSpec, GatedDeltaSpec, ShortConvSpec)
}
