"""gpt-oss (arXiv:2508.10925): attention sinks, windows in every second layer, experts with biases and a clamped gate."""

from collections.abc import Mapping
from dataclasses import replace

from inflight.config.architecture import SILU, SWIGLU_OAI, LayerSpec, ModelArchitecture
from inflight.config.families.expert_fields import GGUF_EXPERTS, NUM_EXPERTS, read_experts
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields

_STACKS = ("gate_up_proj", "down_proj")
_RENAMES = (
    (".mlp.router.", ".mlp.gate."),
    # in MXFP4 they are not transposed, but the rows of gate and up alternate, too
    *(
        (f".mlp.experts.{name}_{part}", f".mlp.experts.alternating.{name}_{part}")
        for name in _STACKS
        for part in ("blocks", "scales")
    ),
    *((f".mlp.experts.{name}", f".mlp.experts.transposed.{name}") for name in _STACKS),
)
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_YARN_KEYS = {  # keys of a GGUF file -> fields
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_GATE = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # the only numbers that the kernels know


def _parse(fields: FamilyFields) -> ModelArchitecture:
    if not fields.has("rope_scaling") and not fields.has("rope_parameters"):
        fields = fields.with_values({"rope_parameters": _ROPE})
    for name, known in _GATE.items():
        if fields.number(name, known) != known:
            raise fields.refusal(f"{name}={fields.values[name]!r} is not supported; {known} is")
    experts = read_experts(fields, size="intermediate_size", renormalizes=True)
    if experts.activation != SILU:
        raise fields.refusal(f"hidden_act={fields.text('hidden_act')!r} is not supported for {FAMILY.architecture}")
    experts = replace(experts, activation=SWIGLU_OAI, bias=True, router=replace(experts.router, bias=True))
    bias = fields.boolean("attention_bias", True)
    attention = fields.attention(head_dim=64, theta=150000.0)
    attention = replace(attention, has_sinks=True, qkv_bias=bias, output_bias=bias)
    by_index = [index % 2 == 0 for index in range(fields.num_layers)]
    windows = fields.windows(by_index, fields.window(128))
    layers = fields.layers_with_windows(LayerSpec(mixer=attention, mlp=experts), windows)
    return replace(fields.architecture(layers, eps=1e-5), renames=_RENAMES)


def _rope_of_gguf(given: Mapping[str, object]) -> dict[str, object]:
    """A GGUF file does not say that yarn's range is not rounded, as in all published models."""
    if given.get("rope.scaling.type") != "yarn":
        return {"rope_parameters": {"rope_type": "default"}}
    found = {name: given[key] for key, name in _YARN_KEYS.items() if key in given}
    return {"rope_scaling": {"rope_type": "yarn", "truncate": False, **found}}


FAMILY = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    gguf_name="gpt-oss",
    gguf_has_experts=True,
    gguf_names={
        **GGUF_EXPERTS,
        "attention.sliding_window": "sliding_window",
        "expert_feed_forward_length": "intermediate_size",
    },
    gguf_fields=_rope_of_gguf,
    gguf_keys=tuple(_YARN_KEYS),
    gguf_tensors={"attn_sinks.weight": "self_attn.sinks", "post_attention_norm": "post_attention_layernorm"},
    parse=_parse,
    reads=NUM_EXPERTS,
)
