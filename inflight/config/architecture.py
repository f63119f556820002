"""`ModelArchitecture`: what config.json says about the network, with the same field names for every family of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from inflight.config.added_embeddings import AddedEmbeddingsSpec
from inflight.config.hidden_inputs import HiddenInputsSpec
from inflight.config.mixers import BaseAttentionSpec, MixerSpec, RecurrenceSpec
from inflight.config.pooler import PoolerSpec
from inflight.config.vision import VisionSpec

# Who computes a model: Inflight's own code, or the code of Hugging Face transformers.
INFLIGHT = "inflight"
TRANSFORMERS = "transformers"

SILU = "silu"
GELU_TANH = "gelu_tanh"
GELU = "gelu"
RELU = "relu"
SIGMOID = "sigmoid"
SWIGLU_OAI = "swiglu_oai"  # the gate of gpt-oss's experts (kernels/gate.py)

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class MlpSpec(ABC):
    """What a layer computes for each token alone, behind its mixer. `MLP_KINDS` (mlp_kinds.py) has all subclasses, and
    models/layer_kinds.py has the layer of each.

    Attributes:
        kind, reads, only_on_cpu, by_transformers_on_gpu: see `MixerSpec`.
    """

    kind: str
    reads: ClassVar[tuple[str, ...]] = ()
    only_on_cpu: ClassVar[str] = ""
    by_transformers_on_gpu: ClassVar[bool] = False

    @property
    @abstractmethod
    def num_features(self) -> int:
        """How often the hidden size is the number of weights that a token is multiplied by."""

    def num_features_read(self, num_tokens: int) -> float:
        """How often the hidden size is the number of weights that a step of `num_tokens` tokens is expected to read."""
        return self.num_features

    @abstractmethod
    def fits(self, tp_size: int) -> bool:
        """See `MixerSpec.fits`."""

    @abstractmethod
    def __str__(self) -> str:
        """See `MixerSpec.__str__`."""


@dataclass(frozen=True, kw_only=True)
class GatedMlpSpec(MlpSpec):
    """The gated MLP of a layer: down(activation(gate(x)) * up(x)). `size` is the number of outputs of gate and of up.

    `activation` is SILU or GELU_TANH. `is_fused`: the checkpoint has one tensor `gate_up_proj` for gate and up.
    """

    kind: Literal["gated"] = "gated"
    size: int
    bias: bool = False
    activation: str = SILU
    is_fused: bool = False

    @property
    def num_features(self) -> int:
        return 3 * self.size

    def fits(self, tp_size: int) -> bool:
        return self.size % tp_size == 0

    def __str__(self) -> str:
        return f"an intermediate size of {self.size}"


@dataclass(frozen=True, kw_only=True)
class NormNames:
    """Where a layer has norms, and their names in the checkpoint. None: there is no norm at this place.

    A norm `before` covers the input of the attention or of the MLP. A norm `after` covers its output, before the output is
    added to the residual stream. The result of a norm that is in `replacing` is also the new residual stream. The norms of
    encoders that are behind the sums are such norms.

    A name that begins with "model." is the whole name; in it, `{previous}` is the number of the layer before.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    replacing: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder layer. Layers with equal specifications are of one kind.

    `has_scalar`: the layer's result is multiplied by a number of the checkpoint, `layer_scalar`. `stored_layer`: the number of
    the layer in the checkpoint whose weights this one has; layers with the same number share them in memory. None: its own.
    """

    mixer: MixerSpec
    mlp: MlpSpec
    norms: NormNames = NormNames()
    has_scalar: bool = False
    stored_layer: int | None = None

    @property
    def attention(self) -> BaseAttentionSpec | None:
        return self.mixer if isinstance(self.mixer, BaseAttentionSpec) else None

    @property
    def recurrence(self) -> RecurrenceSpec | None:
        return self.mixer if isinstance(self.mixer, RecurrenceSpec) else None


@dataclass(frozen=True, kw_only=True)
class TokenInputsSpec:
    """Each layer gets a vector of `size` numbers for each token, which depends on the token's id and on its embedding
    (layers/token_inputs.py). For tokens of images it depends on `padding_id` instead of the id. `activation` is that of its
    gate."""

    vocab_size: int
    size: int
    activation: str
    padding_id: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelArchitecture:
    """A decoder-only transformer.

    `name` is the class name in config.json's "architectures". The same code computes all families (`models/decoder.py`): it
    reads `layers`, which has one entry per layer. `weight_format` says how the linear weights are stored, by a name in
    `weight_format.py`; `weight_blocks` is how many rows and columns of an fp8 weight have one scale, if there are blocks.

    Norms are RMSNorms, or with `has_layer_norm` LayerNorms, which may have a bias (`norm_bias`). They add `rms_norm_eps` to the
    mean square of their input, or to its variance. Those that read the residual stream add `stream_eps`, unless it is None.
    `final_norm` is the name of the norm behind the last layer.

    With `head_bias`, the head has a bias. Without `has_head`, the model has no logits: its result is the hidden states behind
    the final norm.

    Embeddings are multiplied by `embedding_scale`, which is first rounded to the model's dtype if `rounds_embedding_scale` is
    set. Logits l become `logits_scale * l`, and then c * tanh(l / c) if there is a `logits_cap` c. `norm_offset` is added to
    the weights of all norms but those of recurrent layers. The checkpoint may have tensors that are for other uses, such as
    images or drafts: their names begin with one of `unread`. `renames` has parts of names in the family's checkpoints, and what
    replaces them in the names that the loader sees. A pooling model has a `pooler` instead of a head. A model that reads images
    has a tower for them, `vision`.

    `mtp`: the checkpoint may have a layer behind the last one, which predicts drafts from the model's hidden states. With
    `hidden_inputs`, this is such a layer alone: its inputs are hidden states of another model. The inputs of the layers
    `captured` of a model are copied out for such a layer (models/captured_layers.py).

    If `implementation` is TRANSFORMERS, only the sizes, `dtype`, `weight_format` and `eos_token_ids` are known, and `head_dim`
    is an estimate. The model's constructor finds out everything else. `not_native` says then why Inflight's own code does not
    compute the model, if it knows the family.
    """

    name: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    has_layer_norm: bool = False
    norm_bias: bool = False
    head_bias: bool = False
    final_norm: str = "model.norm"
    stream_eps: float | None = None
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    has_head: bool = True
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    logits_scale: float = 1.0
    logits_cap: float | None = None
    token_inputs: TokenInputsSpec | None = None
    added_embeddings: AddedEmbeddingsSpec | None = None
    pooler: PoolerSpec | None = None
    vision: VisionSpec | None = None
    mtp: HiddenInputsSpec | None = None
    hidden_inputs: HiddenInputsSpec | None = None
    captured: tuple[int, ...] = ()
    norm_offset: float = 0.0
    dtype: str = "float32"
    weight_format: str = "plain"
    weight_blocks: tuple[int, int] | None = None
    unread: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    implementation: str = INFLIGHT
    not_native: str = ""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> list[BaseAttentionSpec]:
        """The specifications of the layers with attention, in their order."""
        return [layer.attention for layer in self.layers if layer.attention is not None]

    @property
    def recurrences(self) -> list[RecurrenceSpec]:
        """The specifications of the recurrent layers, in their order."""
        return [layer.recurrence for layer in self.layers if layer.recurrence is not None]

    @property
    def caching(self) -> list[BaseAttentionSpec]:
        """The specifications of the layers that have keys and values of their own."""
        return [attention for attention in self.attentions if attention.kv_layer is None]

    @property
    def head_dims(self) -> list[int]:
        """The sizes of heads in the cache, in the order of the first layers that have them."""
        keys = [attention.head_dim for attention in self.attentions]
        return list(dict.fromkeys([*keys, *(size for each in self.attentions for size in each.cached_sizes)]))

    @property
    def default_max_model_len(self) -> int:
        """The longest request, if the user does not choose it. With longrope, it is the length up to which `factors` hold."""
        ropes = [attention.rope for attention in self.attentions]
        lengths = [rope.original_max_position_embeddings for rope in ropes if rope is not None and rope.long_factors]
        if self.pooler is not None and self.pooler.max_length is not None:
            lengths.append(self.pooler.max_length)
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
    return replace(layer, mixer=replace(attention, rope=replace(rope, factors=rope.long_factors)))
