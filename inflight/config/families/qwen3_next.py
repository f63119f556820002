"""Qwen3-Next with dense layers: the layers of Qwen3.5, with projections whose rows are grouped by key heads. (Layers with
experts are computed by transformers.)"""

from inflight.config.architecture import ModelArchitecture
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.families.qwen3_5 import parse_hybrid


def _is_dense(fields: FamilyFields) -> bool:
    return fields.values.get("num_experts") == 0


def _parse(fields: FamilyFields) -> ModelArchitecture:
    if not _is_dense(fields):
        raise fields.refusal(
            "layers with experts are not supported by Inflight's own code; use model_impl='transformers'"
        )
    return parse_hybrid(fields, is_grouped=True)


FAMILY = Family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    unread=("mtp.",),
    parse=_parse,
    takes=_is_dense,
    reads=("partial_rotary_factor", "num_experts"),
)
