"""ModernBERT (arXiv:2412.13663): norms before attention and MLP, rotary positions, a gated MLP. Two of three layers have a
window, which reaches as far to both sides, and a rotary embedding of their own."""

from dataclasses import replace

from inflight.config.architecture import GatedMlpSpec, LayerSpec, ModelArchitecture, NormNames
from inflight.config.families.encoder_fields import (
    GGUF_KEYS,
    GGUF_TENSORS,
    encoder_attention,
    fields_from_gguf,
    make_encoder,
    read_activation,
    refuse_decoder,
)
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.json_fields import JsonFields
from inflight.config.pooler import CLS, MEAN, ClassHead, DenseSpec

_RENAMES = (
    ("model.embeddings.", "embeddings."),
    ("embeddings.tok_embeddings.", "model.embed_tokens."),
    ("embeddings.norm.", "model.embedding_norm."),
    ("model.final_norm.", "final_norm."),
    ("final_norm.", "model.norm."),
    ("attn.Wqkv.", "self_attn.qkv_proj."),
    ("attn.Wo.", "self_attn.o_proj."),
    ("mlp.Wi.", "mlp.gate_up_proj."),
    ("mlp.Wo.", "mlp.down_proj."),
)


def _parse(fields: FamilyFields) -> ModelArchitecture:
    refuse_decoder(fields)
    attention = replace(encoder_attention(fields, bias=fields.boolean("attention_bias", False)), is_fused=True)
    mlp = GatedMlpSpec(
        size=fields.integer("intermediate_size"),
        bias=fields.boolean("mlp_bias", False),
        activation=read_activation(fields, "hidden_activation"),
        is_fused=True,
    )
    theta = fields.number("global_rope_theta", 160_000.0)
    ropes = fields.ropes(attention.head_dim, theta=theta, local_theta=1e4, local_name="local_rope_theta")
    every = fields.integer("global_attn_every_n_layers", 3)
    by_index = [index % every != 0 for index in range(fields.num_layers)]
    # a token sees those that are at most half of `local_attention` away
    window = fields.integer("local_attention", 128) // 2 + 1
    layer = LayerSpec(mixer=attention, mlp=mlp, norms=NormNames(before_attention="attn_norm", before_mlp="mlp_norm"))
    full, local = (replace(layer, mixer=replace(attention, rope=rope)) for rope in ropes)
    (local,) = fields.layers_with_windows(local, [window])
    first, *later = (local if windowed else full for windowed in fields.which_have_window(by_index, window))
    # the first layer reads the normed embedding itself
    norms = replace(first.norms, before_attention="model.embedding_norm", replacing=("before_attention",))
    return make_encoder(
        fields,
        (replace(first, norms=norms), *later),
        eps=fields.number("norm_eps", 1e-5),
        norm_bias=fields.boolean("norm_bias", False),
        renames=_RENAMES,
    )


def _before_classes(fields: JsonFields, size: int) -> tuple[DenseSpec, ...]:
    activation = fields.text("classifier_activation", "gelu")
    if activation not in ("gelu", "relu", "silu") or fields.boolean("norm_bias", False):
        raise fields.refusal(
            f"classifier_activation={activation!r} with norm_bias={fields.values.get('norm_bias')!r} is not supported; "
            "supported are gelu, relu and silu, without a bias of norms"
        )
    return (
        DenseSpec(
            name="head.dense",
            in_features=size,
            out_features=size,
            bias=fields.boolean("classifier_bias", False),
            activation=activation,
            norm="head.norm",
            norm_eps=fields.number("norm_eps", 1e-5),
        ),
    )


def _pooling_type(fields: JsonFields) -> str:
    return MEAN if fields.text("classifier_pooling", "cls") == "mean" else CLS


FAMILY = Family(
    architecture="ModernBertModel",
    others=("ModernBertForMaskedLM", "ModernBertForSequenceClassification", "ModernBertForTokenClassification"),
    model_type="modernbert",
    parse=_parse,
    gguf_name="modern-bert",
    gguf_names={
        "attention.layer_norm_epsilon": "norm_eps",
        "attention.sliding_window": "local_attention",
        "attention.sliding_window_pattern": "global_attn_every_n_layers",
        "rope.freq_base_swa": "local_rope_theta",
    },
    gguf_fields=fields_from_gguf,
    gguf_keys=GGUF_KEYS,
    gguf_tensors={
        **GGUF_TENSORS,
        "attn_norm": "attn_norm",
        "attn_qkv": "self_attn.qkv_proj",
        "ffn_norm": "mlp_norm",
        "ffn_up": "mlp.gate_up_proj",
    },
    class_head=ClassHead(last="classifier", before=_before_classes, is_before_tokens=True, pooling_type=_pooling_type),
)
