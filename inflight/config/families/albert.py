"""ALBERT (arXiv:1909.11942): BERT's layers, which share their weights, and small embeddings that are projected."""

from dataclasses import replace

from inflight.config.architecture import ModelArchitecture, NormNames
from inflight.config.families.bert import read_bert
from inflight.config.families.encoder_fields import one_dense
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.pooler import ClassHead

_RENAMES = (
    ("albert.", ""),
    ("encoder.embedding_hidden_mapping_in.", "model.embedding_projection."),
    ("encoder.albert_layer_groups.", "model.layers."),
    (".albert_layers.0.", "."),
    ("attention.query.", "self_attn.q_proj."),
    ("attention.key.", "self_attn.k_proj."),
    ("attention.value.", "self_attn.v_proj."),
    ("attention.dense.", "self_attn.o_proj."),
    ("attention.LayerNorm.", "attention_norm."),
    ("ffn.", "mlp.up_proj."),
    ("ffn_output.", "mlp.down_proj."),
    ("full_layer_layer_norm.", "output_norm."),
)


def _parse(fields: FamilyFields) -> ModelArchitecture:
    """Each group of layers has the weights of one layer. The embedding is normed before it is projected, so the first layer has
    no norm before it."""
    inner = fields.integer("inner_group_num", 1)
    if inner != 1:
        raise fields.refusal(f"inner_group_num={inner} is not supported; 1 is")
    num_layers, num_groups = fields.num_layers, fields.integer("num_hidden_groups", 1)
    if num_groups > num_layers:
        raise fields.refusal(f"num_hidden_groups={num_groups} is more than num_hidden_layers={num_layers}")
    model = read_bert(fields.with_values({"hidden_act": fields.text("hidden_act", "gelu_new")}), renames=_RENAMES)
    groups = [int(layer / (num_layers / num_groups)) for layer in range(num_layers)]
    norms = [NormNames(before_attention=None, before_mlp="attention_norm", replacing=("before_mlp",))]
    for group in groups[:-1]:
        norms.append(
            replace(
                norms[0],
                before_attention=f"model.layers.{group}.output_norm",
                replacing=("before_attention", "before_mlp"),
            )
        )
    layers = tuple(
        replace(layer, norms=names, stored_layer=group)
        for layer, names, group in zip(model.layers, norms, groups, strict=True)
    )
    assert model.added_embeddings is not None
    added = replace(model.added_embeddings, factor_size=fields.integer("embedding_size", 128))
    return replace(
        model,
        layers=layers,
        final_norm=f"model.layers.{groups[-1]}.output_norm",
        added_embeddings=added,
        unread=(*model.unread, "predictions.", "sop_classifier."),
    )


FAMILY = Family(
    architecture="AlbertModel",
    others=(
        "AlbertForMaskedLM",
        "AlbertForPreTraining",
        "AlbertForSequenceClassification",
        "AlbertForTokenClassification",
    ),
    model_type="albert",
    parse=_parse,
    class_head=ClassHead(last="classifier", before=one_dense("pooler", "tanh")),
)
