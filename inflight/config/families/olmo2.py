"""OLMo 2 (arXiv:2501.00656): norms after attention and MLP instead of before, and a norm over all queries, and all keys."""

from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture, NormNames
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.mixers import WHOLE

NORMS = NormNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


def _parse(fields: FamilyFields) -> ModelArchitecture:
    attention = replace(fields.attention(absent_kv_heads_mean_all=True, reads_bias=True), qk_norm=WHOLE)
    layer = LayerSpec(mixer=attention, mlp=fields.mlp(), norms=NORMS)
    return fields.architecture((layer,) * fields.num_layers, eps=1e-5)


FAMILY = Family(architecture="Olmo2ForCausalLM", model_type="olmo2", gguf_name="olmo2", parse=_parse)
