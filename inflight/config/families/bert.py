"""BERT (arXiv:1810.04805) and what is built like it: MiniLM, BGE, E5, GTE and others. Learned positions, token types, an MLP
without a gate, norms behind the sums."""

from dataclasses import replace

from inflight.config.added_embeddings import AddedEmbeddingsSpec
from inflight.config.architecture import ModelArchitecture
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
from inflight.config.plain_mlp import PlainMlpSpec
from inflight.config.pooler import ClassHead, MaskHead

_LAYER_RENAMES = (
    ("encoder.layer.", "model.layers."),
    ("attention.self.query.", "self_attn.q_proj."),
    ("attention.self.key.", "self_attn.k_proj."),
    ("attention.self.value.", "self_attn.v_proj."),
    ("attention.output.dense.", "self_attn.o_proj."),
    ("attention.output.LayerNorm.", "attention_norm."),
    ("intermediate.dense.", "mlp.up_proj."),
    ("output.dense.", "mlp.down_proj."),
    ("output.LayerNorm.", "output_norm."),
    ("norm.gamma", "norm.weight"),  # in old checkpoints
    ("norm.beta", "norm.bias"),
)


def read_bert(
    fields: FamilyFields, *, first_position: int = 0, renames: tuple[tuple[str, str], ...] = (("bert.", ""),)
) -> ModelArchitecture:
    """`first_position`: the first row of the table of positions that a token can have. `renames` are added to those of BERT:
    they come first."""
    refuse_decoder(fields)
    positions = fields.text("position_embedding_type", "absolute")
    if positions != "absolute":
        raise fields.refusal(f"position_embedding_type={positions!r} is not supported; absolute is")
    num_positions = fields.integer("max_position_embeddings")
    if num_positions <= first_position:
        raise fields.refusal(
            f"max_position_embeddings={num_positions} leaves no position, because the first {first_position} are not used"
        )
    mlp = PlainMlpSpec(size=fields.integer("intermediate_size"), activation=read_activation(fields))
    layers = layers_with_norms_behind(
        encoder_attention(fields, bias=True),
        mlp,
        fields.num_layers,
        attention_norm="attention_norm",
        output_norm="output_norm",
    )
    model = make_encoder(
        fields,
        layers,
        eps=fields.number("layer_norm_eps", 1e-12),
        final_norm=f"model.layers.{len(layers) - 1}.output_norm",
        renames=(*renames, *EMBEDDING_RENAMES, *_LAYER_RENAMES),
    )
    added = AddedEmbeddingsSpec(
        num_positions=num_positions,
        first_position=first_position,
        num_types=fields.integer("type_vocab_size", 2, least=0),
    )
    return replace(model, added_embeddings=added, max_position_embeddings=num_positions - first_position)


FAMILY = Family(
    architecture="BertModel",
    others=("BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification", "BertForTokenClassification"),
    model_type="bert",
    parse=read_bert,
    gguf_name="bert",
    gguf_names=GGUF_NAMES,
    gguf_fields=fields_from_gguf,
    gguf_keys=GGUF_KEYS,
    # A file of RoBERTa is one of BERT: its positions begin at 0. Its two layers for classes are as those of BERT.
    gguf_tensors={
        **GGUF_TENSORS,
        "attn_output_norm": "attention_norm",
        "layer_output_norm": "output_norm",
        "cls": "pooler.dense",
        "cls.output": "classifier",
    },
    class_head=ClassHead(last="classifier", before=one_dense("pooler.dense", "tanh")),
    mask_head=MaskHead(
        dense="cls.predictions.transform.dense",
        norm="cls.predictions.transform.LayerNorm",
        decoder="cls.predictions.decoder",
        bias="cls.predictions.bias",
    ),
)
