"""GLM-4 of 2024 (arXiv:2406.12793): Llama's layers. Half of each head is rotated, in pairs of neighbouring dimensions."""

from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture, NormNames
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields


def _parse(fields: FamilyFields) -> ModelArchitecture:
    return parse_glm(fields, NormNames())


def parse_glm(fields: FamilyFields, norms: NormNames) -> ModelArchitecture:
    share = fields.number("partial_rotary_factor", 0.5)
    attention = fields.attention(head_dim=128, partial_rotary_factor=share)
    assert attention.rope is not None
    attention = replace(
        attention, rope=replace(attention.rope, interleaved=True), qkv_bias=fields.boolean("attention_bias", True)
    )
    layer = LayerSpec(mixer=attention, mlp=fields.mlp(is_fused=True), norms=norms)
    return fields.architecture((layer,) * fields.num_layers, eps=1.5625e-7)


FAMILY = Family(architecture="GlmForCausalLM", model_type="glm", parse=_parse, reads=("partial_rotary_factor",))
