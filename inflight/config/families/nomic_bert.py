"""NomicBERT (arXiv:2402.01613): BERT's norms and token types, with rotary positions and a gated MLP, and without biases."""

from dataclasses import replace

from inflight.config.added_embeddings import AddedEmbeddingsSpec
from inflight.config.architecture import GatedMlpSpec, ModelArchitecture
from inflight.config.families.encoder_fields import (
    EMBEDDING_RENAMES,
    GGUF_KEYS,
    GGUF_NAMES,
    GGUF_TENSORS,
    encoder_attention,
    fields_from_gguf,
    layers_with_norms_behind,
    make_encoder,
    one_dense,
    read_activation,
    refuse_decoder,
)
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.pooler import ClassHead

# The published config.json has fields of a code of its own. transformers writes tensors under the names of that code, too.
_FIELDS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
# What that code can do beside it -> the value that it has in NomicBERT.
_NEEDED = {
    "activation_function": "swiglu",
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "prenorm": False,
    "causal": False,
    "use_rms_norm": False,
    "parallel_block": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_weights": True,
    "num_experts": 0,
}
_RENAMES = (
    ("nomic_bert.", ""),
    ("emb_ln.", "model.embedding_norm."),
    *EMBEDDING_RENAMES,
    ("model.layers.", "layers."),
    ("encoder.layers.", "layers."),
    ("layers.", "model.layers."),
    ("attn.Wqkv.", "self_attn.qkv_proj."),
    ("attn.out_proj.", "self_attn.o_proj."),
    ("mlp.fc11.", "mlp.up_proj."),
    ("mlp.fc12.", "mlp.gate_proj."),
    ("mlp.fc2.", "mlp.down_proj."),
    (".norm1.", ".post_attention_layernorm."),
    (".norm2.", ".post_mlp_layernorm."),
)


def _parse(fields: FamilyFields) -> ModelArchitecture:
    refuse_decoder(fields)
    if fields.has("n_embd"):
        fields = _in_today_s_names(fields)
    attention = encoder_attention(fields, bias=False, has_rope=True, theta=1000.0)
    layers = layers_with_norms_behind(
        replace(attention, is_fused=True),
        GatedMlpSpec(size=fields.integer("intermediate_size"), activation=read_activation(fields, default="silu")),
        fields.num_layers,
        attention_norm="post_attention_layernorm",
        output_norm="post_mlp_layernorm",
    )
    model = make_encoder(
        fields,
        layers,
        eps=fields.number("layer_norm_eps", 1e-12),
        final_norm=f"model.layers.{len(layers) - 1}.post_mlp_layernorm",
        renames=_RENAMES,
    )
    num_types = fields.integer("type_vocab_size", 2, least=0)
    return replace(model, added_embeddings=AddedEmbeddingsSpec(num_types=num_types) if num_types else None)


def _in_today_s_names(fields: FamilyFields) -> FamilyFields:
    for name, needed in _NEEDED.items():
        if fields.values.get(name, needed) != needed:
            raise fields.refusal(f"{name}={fields.values[name]!r} is not supported for NomicBertModel; {needed!r} is")
    if fields.has("max_trained_positions"):  # a longer text would need other frequencies
        fields = fields.with_values({"n_positions": fields.values["max_trained_positions"]})
    renamed = {ours: fields.values[name] for name, ours in _FIELDS.items() if fields.has(name)}
    return fields.with_values({**renamed, "hidden_act": "silu"})


FAMILY = Family(
    architecture="NomicBertModel",
    others=("NomicBertForMaskedLM", "NomicBertForSequenceClassification", "NomicBertForTokenClassification"),
    model_type="nomic_bert",
    parse=_parse,
    gguf_name="nomic-bert",
    gguf_names=GGUF_NAMES,
    gguf_fields=fields_from_gguf,
    gguf_keys=GGUF_KEYS,
    gguf_tensors={
        **GGUF_TENSORS,
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output_norm": "post_attention_layernorm",
        "layer_output_norm": "post_mlp_layernorm",
    },
    class_head=ClassHead(last="classifier", before=one_dense("pooler.dense", "tanh")),
)
