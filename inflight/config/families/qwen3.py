"""Qwen3 (arXiv:2505.09388): Llama's layers with a norm on every query and key head. Its windows are those of Qwen2."""

from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.families.qwen2 import read_windows
from inflight.config.hidden_inputs import NAMED_MTP
from inflight.config.mixers import HEAD


def _parse(fields: FamilyFields) -> ModelArchitecture:
    attention = replace(fields.attention(head_dim=128, reads_bias=True), qk_norm=HEAD)
    layer = LayerSpec(mixer=attention, mlp=fields.mlp())
    model = fields.architecture(fields.layers_with_windows(layer, read_windows(fields)))
    return replace(model, mtp=NAMED_MTP)


FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    parse=_parse,
    gguf_name="qwen3",
    unread=("mtp.", "cls.output."),  # the second: copies of two rows of the head, in the GGUF file of a reranker
)
