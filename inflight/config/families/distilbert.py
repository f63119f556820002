"""DistilBERT (arXiv:1910.01108): BERT's layers without token types. Its sizes have other names."""

from inflight.config.architecture import ModelArchitecture
from inflight.config.families.bert import read_bert
from inflight.config.families.encoder_fields import one_dense
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.pooler import ClassHead, MaskHead

_SIZES = {
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}
_RENAMES = (
    ("distilbert.", ""),
    ("transformer.layer.", "model.layers."),
    ("attention.q_lin.", "self_attn.q_proj."),
    ("attention.k_lin.", "self_attn.k_proj."),
    ("attention.v_lin.", "self_attn.v_proj."),
    ("attention.out_lin.", "self_attn.o_proj."),
    ("sa_layer_norm.", "attention_norm."),
    ("ffn.lin1.", "mlp.up_proj."),
    ("ffn.lin2.", "mlp.down_proj."),
    ("output_layer_norm.", "output_norm."),
)


def _parse(fields: FamilyFields) -> ModelArchitecture:
    """Sinusoidal positions are stored as a table, too."""
    sizes = {ours: fields.values[name] for name, ours in _SIZES.items() if fields.has(name)}
    return read_bert(fields.with_values({**sizes, "type_vocab_size": 0}), renames=_RENAMES)


FAMILY = Family(
    architecture="DistilBertModel",
    others=("DistilBertForMaskedLM", "DistilBertForSequenceClassification", "DistilBertForTokenClassification"),
    model_type="distilbert",
    parse=_parse,
    class_head=ClassHead(last="classifier", before=one_dense("pre_classifier", "relu")),
    mask_head=MaskHead(
        dense="vocab_transform",
        norm="vocab_layer_norm",
        decoder="vocab_projector",
        bias="vocab_projector.bias",
        activation_field="activation",
    ),
)
