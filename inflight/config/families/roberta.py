"""RoBERTa (arXiv:1907.11692): BERT's layers. Positions begin behind the number of the padding token."""

from inflight.config.architecture import ModelArchitecture
from inflight.config.families.bert import read_bert
from inflight.config.families.encoder_fields import one_dense
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.pooler import ClassHead, MaskHead


def read_roberta(fields: FamilyFields) -> ModelArchitecture:
    padding = fields.integer("pad_token_id", 1, least=0)
    return read_bert(fields, first_position=padding + 1, renames=(("roberta.", ""),))


CLASS_HEAD = ClassHead(last="classifier.out_proj", before=one_dense("classifier.dense", "tanh"))
MASK_HEAD = MaskHead(
    dense="lm_head.dense",
    norm="lm_head.layer_norm",
    decoder="lm_head.decoder",
    bias="lm_head.bias",
    activation_field="",
)
FAMILY = Family(
    architecture="RobertaModel",
    others=("RobertaForMaskedLM", "RobertaForSequenceClassification", "RobertaForTokenClassification"),
    model_type="roberta",
    parse=read_roberta,
    class_head=CLASS_HEAD,
    mask_head=MASK_HEAD,
)
