"""Mixtral (arXiv:2401.04088): Mistral's layers, with a mixture of experts instead of the MLP."""

from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.expert_fields import GGUF_EXPERTS, NUM_EXPERTS, read_experts
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields

_RENAMES = ((".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj."))


def _parse(fields: FamilyFields) -> ModelArchitecture:
    window = fields.window() if fields.has("sliding_window") else None
    num_layers = fields.num_layers
    fields.refuse_other_windows([window is not None] * num_layers, window, FAMILY.architecture)
    experts = read_experts(fields, size="intermediate_size", renormalizes=True)
    layer = LayerSpec(mixer=fields.attention(theta=1e6), mlp=experts)
    model = fields.architecture(fields.layers_with_windows(layer, [window] * num_layers), eps=1e-5)
    return replace(model, renames=_RENAMES)


FAMILY = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    gguf_name="llama",
    gguf_has_experts=True,
    gguf_names=GGUF_EXPERTS,
    gguf_interleaves_heads=True,
    parse=_parse,
    reads=NUM_EXPERTS,
)
