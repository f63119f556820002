"""LFM2 (arXiv:2511.23404): most layers are short convolutions, the others have attention with norms on queries and keys."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture, NormNames
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields, layers_with
from inflight.config.mixers import HEAD, MixerSpec, ShortConvSpec

_NORMS = NormNames(before_attention="operator_norm", before_mlp="ffn_norm")
_RENAMES = (
    (".feed_forward.expert_bias", ".mlp.gate.e_score_correction_bias"),
    ("model.embedding_norm.", "model.norm."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".q_layernorm.", ".q_norm."),
    (".k_layernorm.", ".k_norm."),
    (".feed_forward.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
)


def read_lfm2_mixers(fields: FamilyFields, default: list[bool]) -> list[MixerSpec]:
    """The mixers of all layers. `default`: which layers have attention, if config.json has no layer_types."""
    kernel_size = fields.integer("conv_L_cache", 3)
    if kernel_size < 2:
        raise fields.refusal(f"conv_L_cache={kernel_size} is not supported; at least 2 is")
    attention = replace(fields.attention(theta=1e6), qk_norm=HEAD)
    recurrence = ShortConvSpec(
        num_channels=fields.integer("hidden_size"), kernel_size=kernel_size, bias=fields.boolean("conv_bias", False)
    )
    return [attention if each else recurrence for each in fields.which_have_attention("conv", default)]


def make_lfm2(fields: FamilyFields, layers: Iterable[LayerSpec]) -> ModelArchitecture:
    layers = tuple(replace(layer, norms=_NORMS) for layer in layers)
    is_tied = fields.boolean("tie_embedding", fields.boolean("tie_word_embeddings", True))
    return replace(
        fields.architecture(layers),
        rms_norm_eps=fields.number("norm_eps", 1e-5),
        tie_word_embeddings=is_tied,
        renames=_RENAMES,
    )


def _parse(fields: FamilyFields) -> ModelArchitecture:
    chosen = range(fields.num_layers) if not fields.has("full_attn_idxs") else fields.token_ids("full_attn_idxs")
    mixers = read_lfm2_mixers(fields, [index in chosen for index in range(fields.num_layers)])
    mlp = replace(fields.silu_mlp(), size=_mlp_size(fields))
    return make_lfm2(fields, layers_with(mixers, mlp))


def _mlp_size(fields: FamilyFields) -> int:
    size = fields.integer("block_ff_dim", fields.integer("intermediate_size", 12288))
    if not fields.boolean("block_auto_adjust_ff_dim", True):
        return size
    if fields.is_null("block_ffn_dim_multiplier"):
        return int(2 * size / 3)
    multiple = fields.integer("block_multiple_of", 256)
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


def lfm2_from_gguf(given: Mapping[str, object]) -> dict[str, object]:
    """A layer without key heads is a convolution."""
    found = {
        "conv_L_cache": given.get("shortconv.l_cache", 3),
        "norm_eps": given.get("attention.layer_norm_rms_epsilon"),
    }
    heads = given.get("attention.head_count_kv")
    if isinstance(heads, list):
        found |= {"full_attn_idxs": [i for i, n in enumerate(heads) if n], "num_key_value_heads": max(heads)}
    return {**found, "block_auto_adjust_ff_dim": False}


GGUF_KEYS = ("attention.head_count_kv", "shortconv.l_cache")  # that `lfm2_from_gguf` reads
GGUF_TENSORS = {
    "token_embd_norm": "model.norm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}

FAMILY = Family(
    architecture="Lfm2ForCausalLM",
    model_type="lfm2",
    gguf_name="lfm2",
    gguf_fields=lfm2_from_gguf,
    gguf_keys=GGUF_KEYS,
    gguf_tensors=GGUF_TENSORS,
    parse=_parse,
)
