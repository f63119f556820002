"""OLMo 3 (arXiv:2512.13961): OLMo 2's layers. Three of four have a window, and a rotary embedding without scaling."""

from dataclasses import replace

from inflight.config.architecture import WHOLE, LayerSpec, ModelArchitecture
from inflight.config.families.family import (
    Family,
    make_architecture,
    read_attention,
    read_mlp,
    read_ropes,
    two_kinds_of_layers,
)
from inflight.config.families.olmo2 import NORMS
from inflight.config.json_fields import JsonFields


def _parse(fields: JsonFields) -> ModelArchitecture:
    attention = read_attention(fields, absent_kv_heads_mean_all=True, has_rope=False, reads_bias=True)
    layer = LayerSpec(attention=replace(attention, qk_norm=WHOLE), mlp=read_mlp(fields), norms=NORMS)
    ropes = read_ropes(fields, attention.head_dim, theta=500000.0, local_theta=500000.0)
    return make_architecture(fields, two_kinds_of_layers(fields, layer, ropes, 4), eps=1e-5)


FAMILY = Family(architecture="Olmo3ForCausalLM", model_type="olmo3", parse=_parse)
