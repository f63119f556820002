"""CamemBERT (arXiv:1911.03894): as RoBERTa."""

from inflight.config.families.family import Family
from inflight.config.families.roberta import CLASS_HEAD, MASK_HEAD, read_roberta

FAMILY = Family(
    architecture="CamembertModel",
    others=("CamembertForMaskedLM", "CamembertForSequenceClassification", "CamembertForTokenClassification"),
    model_type="camembert",
    parse=read_roberta,
    class_head=CLASS_HEAD,
    mask_head=MASK_HEAD,
)
