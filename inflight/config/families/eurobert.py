"""EuroBERT (arXiv:2503.05500): Llama's layers, with attention in both directions."""

from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.encoder_fields import (
    GGUF_KEYS,
    UNREAD,
    encoder_attention,
    fields_from_gguf,
    one_dense,
    refuse_decoder,
)
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.json_fields import JsonFields
from inflight.config.pooler import CLS, MEAN, ClassHead


def _parse(fields: FamilyFields) -> ModelArchitecture:
    refuse_decoder(fields)
    attention = encoder_attention(fields, bias=fields.boolean("attention_bias", False), has_rope=True)
    layer = LayerSpec(mixer=attention, mlp=fields.mlp(bias=fields.boolean("mlp_bias", False)))
    model = fields.architecture((layer,) * fields.num_layers, eps=1e-5)
    return replace(model, tie_word_embeddings=False, has_head=False, unread=UNREAD)


def _classifier_pooling(fields: JsonFields) -> str:
    """ "bos", "mean", or "late": the layers for classes are computed for each token, and their results are averaged."""
    chosen = fields.text("classifier_pooling", "late")
    if chosen not in ("bos", "mean", "late"):
        raise fields.refusal(f"classifier_pooling={chosen!r} is not supported; supported are bos, mean and late")
    return chosen


FAMILY = Family(
    architecture="EuroBertModel",
    others=("EuroBertForMaskedLM", "EuroBertForSequenceClassification", "EuroBertForTokenClassification"),
    model_type="eurobert",
    parse=_parse,
    gguf_name="eurobert",
    gguf_fields=fields_from_gguf,
    gguf_keys=GGUF_KEYS,
    class_head=ClassHead(
        last="classifier",
        before=one_dense("dense", "gelu"),
        pooling_type=lambda fields: CLS if _classifier_pooling(fields) == "bos" else MEAN,
        is_before_pooling=lambda fields: _classifier_pooling(fields) == "late",
    ),
)
