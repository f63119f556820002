"""ERNIE 4.5 with experts (21B-A3B, 300B-A47B): Llama's layers, rotated in pairs of neighbouring dimensions, and experts whose
scores are a softmax and get a bias for the choice."""

from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.experts import MoeSpec, RouterSpec
from inflight.config.families.expert_fields import (
    SHARED_EXPERTS,
    read_experts,
    refuse_null,
    refuse_zero,
    with_shared_experts,
)
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields

# Inflight's own code has a bias for the choice beside the weights of the router
_BIASES = ((".mlp.moe_statics.", ".mlp.gate."), (".mlp.gate.moe_statics.", ".mlp.gate."))


def _parse(fields: FamilyFields) -> ModelArchitecture:
    # With use_bias, the head has a bias, too. moe_norm_min is the least sum that weights are divided by. All published
    # models have these values.
    refuse_null(fields, "use_bias", "moe_norm_min")
    for name, served in {"use_bias": False, "moe_norm_min": 1e-12}.items():
        if fields.values.get(name, served) != served:
            raise fields.refusal(f"{name}={fields.values[name]!r} is not supported; {served!r} is")
    attention = fields.attention(theta=500000.0)
    assert attention.rope is not None
    attention = replace(attention, rope=replace(attention.rope, interleaved=True))
    has_experts = _which_have_experts(fields)
    dense, experts = fields.mlp(), _read_experts(fields) if any(has_experts) else None
    layers = (LayerSpec(mixer=attention, mlp=experts if each and experts else dense) for each in has_experts)
    model = fields.architecture(tuple(layers), eps=1e-5, is_tied=True)
    return replace(model, renames=(SHARED_EXPERTS, *_BIASES))


def _read_experts(fields: FamilyFields) -> MoeSpec:
    router = RouterSpec(top_k=1, has_choice_bias=True, choice_bias_is_row=True)
    experts = read_experts(fields, names=("moe_num_experts",), num_chosen="moe_k", renormalizes=True, router=router)
    return with_shared_experts(fields, experts, 2, name="moe_num_shared_experts", least=0)


def _which_have_experts(fields: FamilyFields) -> list[bool]:
    """Every `moe_layer_interval`-th layer, from `moe_layer_start_index` to `moe_layer_end_index`, which is -1 for the last
    one."""
    names = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
    refuse_null(fields, *names)
    refuse_zero(fields, names[2])
    start, interval = fields.integer(names[0], 1, least=0), fields.integer(names[2], 1)
    is_last = fields.values.get(names[1], -1) == -1
    end = fields.num_layers - 1 if is_last else fields.integer(names[1], least=0)
    return [start <= index <= end and (index + 1) % interval == 0 for index in range(fields.num_layers)]


FAMILY = Family(
    architecture="Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    gguf_name="ernie4_5-moe",
    gguf_has_experts=True,
    gguf_names={
        "expert_count": "moe_num_experts",
        "expert_used_count": "moe_k",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "moe_num_shared_experts",
        "interleave_moe_layer_step": "moe_layer_interval",
        "leading_dense_block_count": "moe_layer_start_index",
    },
    # not the size of the shared experts, although its name says so
    gguf_keys=("expert_shared_feed_forward_length",),
    gguf_tensors={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    unread=("model.mtp_",),
    parse=_parse,
)
