"""Phi-3.5-MoE (arXiv:2404.14219): Mixtral's layers with LayerNorms and biases, longrope, and a sparse mixer as router."""

from collections.abc import Mapping
from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.experts import SPARSE_MIXER, RouterSpec
from inflight.config.families.expert_fields import GGUF_EXPERTS, NUM_EXPERTS, read_experts, refuse_other_values
from inflight.config.families.family import TENSORS, Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.families.phi3 import PHI3_KEYS, phi3_from_gguf

_RENAMES = ((".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj."))

_MSCALE = 1.243163121016122  # longrope's attention factor in all published models


def _parse(fields: FamilyFields) -> ModelArchitecture:
    fields = _with_one_mscale(fields)
    refuse_other_values(fields, num_experts_per_tok=2)  # transformers' class chooses two, whatever the field says
    router = RouterSpec(top_k=2, scoring=SPARSE_MIXER, jitter=fields.number("router_jitter_noise", 0.01))
    experts = read_experts(fields, size="intermediate_size", renormalizes=False, router=router)
    layer = LayerSpec(mixer=fields.attention(theta=1e6, reads_bias=True), mlp=experts)
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    model = fields.architecture(fields.layers_with_windows(layer, [window] * fields.num_layers), eps=1e-5)
    head_bias = fields.boolean("lm_head_bias", False)
    if head_bias and model.tie_word_embeddings:
        raise fields.refusal("lm_head_bias=True with tie_word_embeddings=True is not supported")
    return replace(model, has_layer_norm=True, norm_bias=True, head_bias=head_bias, renames=_RENAMES)


def _with_one_mscale(fields: FamilyFields) -> FamilyFields:
    """The family's own names of longrope's attention factor: one for short requests, and one for long ones."""
    name = "rope_scaling" if fields.has("rope_scaling") else "rope_parameters"
    rope = fields.mapping(name)
    if not (rope.has("short_mscale") or rope.has("long_mscale")):
        return fields
    short, long = rope.number("short_mscale"), rope.number("long_mscale")
    if short != long:
        raise rope.refusal(f"short_mscale={short} and long_mscale={long} differ, which is not supported")
    values = {key: value for key, value in rope.values.items() if key not in ("short_mscale", "long_mscale")}
    return fields.with_values({name: {**values, "attention_factor": short}})


def _from_gguf(given: Mapping[str, object]) -> dict[str, object]:
    """llama.cpp's converter writes Phi-3's attention factor, which is not that of this family."""
    tensors = given[TENSORS]
    assert isinstance(tensors, list)
    found = {**phi3_from_gguf(given), "lm_head_bias": "output.bias" in tensors}
    rope = found.get("rope_scaling")
    return found | ({"rope_scaling": {**rope, "attention_factor": _MSCALE}} if isinstance(rope, Mapping) else {})


FAMILY = Family(
    architecture="PhimoeForCausalLM",
    others=("PhiMoEForCausalLM",),  # as released checkpoints call it
    model_type="phimoe",
    gguf_name="phimoe",
    gguf_has_experts=True,
    gguf_names=GGUF_EXPERTS,
    gguf_fields=_from_gguf,
    gguf_keys=PHI3_KEYS,
    parse=_parse,
    reads=NUM_EXPERTS,
)
