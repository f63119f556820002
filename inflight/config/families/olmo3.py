"""OLMo 3 (arXiv:2512.13961): OLMo 2's layers. Three of four have a window, and a rotary embedding without scaling."""

from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.families.olmo2 import NORMS
from inflight.config.mixers import WHOLE


def _parse(fields: FamilyFields) -> ModelArchitecture:
    attention = fields.attention(absent_kv_heads_mean_all=True, has_rope=False, reads_bias=True)
    layer = LayerSpec(mixer=replace(attention, qk_norm=WHOLE), mlp=fields.mlp(), norms=NORMS)
    ropes = fields.ropes(attention.head_dim, theta=500000.0, local_theta=500000.0)
    return fields.architecture(fields.two_kinds_of_layers(layer, ropes, 4), eps=1e-5)


FAMILY = Family(architecture="Olmo3ForCausalLM", model_type="olmo3", parse=_parse)
