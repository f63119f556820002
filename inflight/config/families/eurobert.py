"""EuroBERT (arXiv:2503.05500): Llama's layers, with attention in both directions."""

from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.encoder_fields import (
    GGUF_KEYS,
    UNREAD,
    encoder_attention,
    fields_from_gguf,
    refuse_decoder,
)
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields


def _parse(fields: FamilyFields) -> ModelArchitecture:
    refuse_decoder(fields)
    attention = encoder_attention(fields, bias=fields.boolean("attention_bias", False), has_rope=True)
    layer = LayerSpec(mixer=attention, mlp=fields.mlp(bias=fields.boolean("mlp_bias", False)))
    model = fields.architecture((layer,) * fields.num_layers, eps=1e-5)
    return replace(model, tie_word_embeddings=False, has_head=False, unread=UNREAD)


FAMILY = Family(
    architecture="EuroBertModel",
    others=("EuroBertForMaskedLM", "EuroBertForSequenceClassification", "EuroBertForTokenClassification"),
    model_type="eurobert",
    parse=_parse,
    gguf_name="eurobert",
    gguf_fields=fields_from_gguf,
    gguf_keys=GGUF_KEYS,
)
