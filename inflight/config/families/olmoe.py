"""OLMoE (arXiv:2409.02060): Llama's layers with a norm over all queries and one over all keys, and experts."""

from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.expert_fields import GGUF_EXPERTS, GGUF_RENORMALIZES, NUM_EXPERTS, read_experts
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.mixers import WHOLE


def _parse(fields: FamilyFields) -> ModelArchitecture:
    attention = replace(fields.attention(absent_kv_heads_mean_all=True, reads_bias=True), qk_norm=WHOLE)
    layer = LayerSpec(mixer=attention, mlp=read_experts(fields, size="intermediate_size"))
    return fields.architecture((layer,) * fields.num_layers, eps=1e-5)


FAMILY = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    gguf_name="olmoe",
    gguf_has_experts=True,
    gguf_names={**GGUF_EXPERTS, **GGUF_RENORMALIZES},
    parse=_parse,
    reads=NUM_EXPERTS,
)
