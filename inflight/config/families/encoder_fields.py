"""What the families of encoders have in common: attention in both directions, LayerNorm, and no head for tokens.

The names of a checkpoint of the whole model begin with the name of its encoder, those of the encoder alone do not. Heads and
poolers behind the encoder are not a part of it: their tensors are left unread.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from inflight.config.architecture import GELU, GELU_TANH, RELU, SILU, LayerSpec, MlpSpec, ModelArchitecture, NormNames
from inflight.config.families.family_fields import FamilyFields
from inflight.config.json_fields import JsonFields
from inflight.config.mixers import AttentionSpec
from inflight.config.pooler import DenseSpec

_ACTIVATIONS = {
    **dict.fromkeys(("silu", "swish"), SILU),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), GELU_TANH),
    "gelu": GELU,
    "relu": RELU,
}
# parts of names in checkpoints -> of the names that the loader sees
EMBEDDING_RENAMES = (
    ("embeddings.word_embeddings.", "model.embed_tokens."),
    ("embeddings.position_embeddings.", "model.position_embeddings."),
    ("embeddings.token_type_embeddings.", "model.token_type_embeddings."),
    ("embeddings.LayerNorm.", "model.embedding_norm."),
)
# Of heads, of poolers, and of buffers that old checkpoints have.
UNREAD = tuple(
    """pooler. pooler_ dense. classifier. cls. lm_head. head. decoder. score. qa_outputs. pre_classifier. vocab_transform.
    vocab_layer_norm. vocab_projector. linear. embeddings.position_ids embeddings.token_type_ids""".split()
)


def read_activation(fields: FamilyFields, name: str = "hidden_act", default: str = "gelu") -> str:
    """The activation of an MLP, with or without a gate.

    Raises:
        UnsupportedModelError: Inflight does not have this activation.
    """
    activation = fields.text(name, default)
    if activation not in _ACTIVATIONS:
        raise fields.refusal(f"{name}={activation!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[activation]


# Keys of a GGUF file -> the fields of config.json with the same values
GGUF_NAMES = {"attention.layer_norm_epsilon": "layer_norm_eps"}
GGUF_KEYS = ("attention.causal",)
GGUF_TENSORS = {
    "token_embd_norm": "model.embedding_norm",
    "position_embd": "model.position_embeddings",
    "token_types": "model.token_type_embeddings",
}


def fields_from_gguf(given: Mapping[str, object]) -> dict[str, object]:
    return {"is_decoder": given.get("attention.causal", False)}


def refuse_decoder(fields: FamilyFields) -> None:
    """
    Raises:
        UnsupportedModelError: the model is a decoder with the layers of an encoder.
    """
    for name in ("is_decoder", "add_cross_attention"):
        if fields.boolean(name, False):
            raise fields.refusal(f"{name}=true is not supported for encoders by Inflight's own code")


def encoder_attention(fields: FamilyFields, *, bias: bool, has_rope: bool = False, theta: float = 1e4) -> AttentionSpec:
    """Attention in both directions. Each query head has its own key head, if config.json does not say otherwise."""
    attention = fields.attention(absent_kv_heads_mean_all=True, has_rope=has_rope, theta=theta)
    return replace(attention, is_causal=False, qkv_bias=bias, output_bias=bias)


def layers_with_norms_behind(
    attention: AttentionSpec, mlp: MlpSpec, num_layers: int, *, attention_norm: str, output_norm: str
) -> tuple[LayerSpec, ...]:
    """Layers with their norms behind the sums: behind that of the attention, and behind that of the MLP. The second one is the
    norm before the next layer, and the norm of the embedding is the one before the first layer."""
    both = ("before_attention", "before_mlp")
    first = NormNames(before_attention="model.embedding_norm", before_mlp=attention_norm, replacing=both)
    later = replace(first, before_attention=f"model.layers.{{previous}}.{output_norm}")
    layer = LayerSpec(mixer=attention, mlp=mlp, norms=later)
    return (replace(layer, norms=first), *(layer for _ in range(num_layers - 1)))


def make_encoder(
    fields: FamilyFields,
    layers: tuple[LayerSpec, ...],
    *,
    eps: float,
    norm_bias: bool = True,
    final_norm: str = "model.norm",
    renames: Iterable[tuple[str, str]],
) -> ModelArchitecture:
    """The specification of an encoder with LayerNorm."""
    return replace(
        fields.architecture(layers, eps=eps),
        has_layer_norm=True,
        norm_bias=norm_bias,
        final_norm=final_norm,
        tie_word_embeddings=False,
        has_head=False,
        unread=UNREAD,
        renames=tuple(renames),
    )


def one_dense(name: str, activation: str) -> Callable[[JsonFields, int], tuple[DenseSpec, ...]]:
    """For `ClassHead.before`: one layer that keeps the size."""
    return lambda fields, size: (
        DenseSpec(name=name, in_features=size, out_features=size, bias=True, activation=activation),
    )
