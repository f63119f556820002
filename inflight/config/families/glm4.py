"""GLM-4-0414: the layers of `glm.py` with norms before and after attention and MLP."""

from functools import partial

from inflight.config.architecture import NormNames
from inflight.config.families.family import Family, partial_rotation
from inflight.config.families.glm import parse_glm

_NORMS = NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


FAMILY = Family(
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    gguf_name="glm4",
    gguf_fields=partial_rotation,
    gguf_keys=("rope.dimension_count",),
    gguf_tensors={"ffn_up": "mlp.gate_up_proj"},
    parse=partial(parse_glm, norms=_NORMS),
    reads=("partial_rotary_factor",),
)
