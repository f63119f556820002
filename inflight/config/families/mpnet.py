"""MPNet (arXiv:2004.09297): BERT's layers without token types, and a bias of the scores by the distance of the tokens."""

from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.bert import read_bert
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.families.roberta import CLASS_HEAD, MASK_HEAD
from inflight.config.mixers import AttentionSpec, PositionBiasSpec

_PADDING = 1  # positions begin behind the number of the padding token, which no field changes
_NUM_BUCKETS = 32  # transformers computes with so many, whatever config.json says
_MAX_DISTANCE = 128
_MORE_KEYS = 32  # the kernel reads biases for keys in groups, which reach beyond the last key
_RENAMES = (
    ("mpnet.", ""),
    ("encoder.relative_attention_bias.", "model.relative_attention_bias."),
    *((f"attention.attn.{letter}.", f"self_attn.{letter}_proj.") for letter in "qkvo"),
    ("attention.LayerNorm.", "attention_norm."),
)


def _parse(fields: FamilyFields) -> ModelArchitecture:
    buckets = fields.integer("relative_attention_num_buckets", _NUM_BUCKETS)
    if buckets != _NUM_BUCKETS:
        raise fields.refusal(f"relative_attention_num_buckets={buckets} is not supported; {_NUM_BUCKETS} is")
    model = read_bert(fields.with_values({"type_vocab_size": 0}), first_position=_PADDING + 1, renames=_RENAMES)
    bias = PositionBiasSpec(
        name="model.relative_attention_bias",
        num_buckets=_NUM_BUCKETS,
        max_distance=_MAX_DISTANCE,
        radius=model.max_position_embeddings + _MORE_KEYS,
    )
    return replace(model, layers=tuple(_with_bias(layer, bias) for layer in model.layers))


def _with_bias(layer: LayerSpec, bias: PositionBiasSpec) -> LayerSpec:
    assert isinstance(layer.mixer, AttentionSpec)
    return replace(layer, mixer=replace(layer.mixer, position_bias=bias))


FAMILY = Family(
    architecture="MPNetModel",
    others=("MPNetForMaskedLM", "MPNetForSequenceClassification", "MPNetForTokenClassification"),
    model_type="mpnet",
    parse=_parse,
    class_head=CLASS_HEAD,
    mask_head=MASK_HEAD,
)
