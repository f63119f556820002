"""XLM-RoBERTa (arXiv:1911.02116), multilingual E5, BGE-M3: as RoBERTa."""

from inflight.config.families.family import Family
from inflight.config.families.roberta import CLASS_HEAD, MASK_HEAD, read_roberta

FAMILY = Family(
    architecture="XLMRobertaModel",
    others=("XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification", "XLMRobertaForTokenClassification"),
    model_type="xlm-roberta",
    parse=read_roberta,
    class_head=CLASS_HEAD,
    mask_head=MASK_HEAD,
)
