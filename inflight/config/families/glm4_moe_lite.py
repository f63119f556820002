"""GLM-4.7-Flash: the layers of DeepSeek-V3. By default only the first one has no experts."""

from dataclasses import replace

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.config.families.deepseek_v2 import read_latent_attention
from inflight.config.families.deepseek_v3 import read_biased_experts
from inflight.config.families.expert_fields import SHARED_EXPERTS, drafting_layers
from inflight.config.families.family import Family
from inflight.config.families.family_fields import FamilyFields
from inflight.config.hidden_inputs import numbered_mtp


def _parse(fields: FamilyFields) -> ModelArchitecture:
    attention = read_latent_attention(fields, interleaved=fields.boolean("rope_interleave", True))
    has_experts = _which_have_experts(fields)
    dense = LayerSpec(mixer=attention, mlp=fields.mlp())
    layers = [dense] * fields.num_layers
    if any(has_experts):
        experts = read_biased_experts(fields, num_groups=1, top_groups=1, scale=1.8)
        layers = [LayerSpec(mixer=attention, mlp=experts) if each else dense for each in has_experts]
    model = fields.architecture(tuple(layers), eps=1e-5)
    return replace(
        model, renames=(SHARED_EXPERTS,), unread=drafting_layers(fields), mtp=numbered_mtp(fields.num_layers)
    )


def _which_have_experts(fields: FamilyFields) -> list[bool]:
    """The field mlp_layer_types. transformers' class does not read first_k_dense_replace; a contradiction is refused."""
    given = fields.texts("mlp_layer_types") or ("dense", *["sparse"] * (fields.num_layers - 1))
    if set(given) - {"dense", "sparse"} or len(given) != fields.num_layers:
        raise fields.impossible(
            f"mlp_layer_types={list(given)!r} must have num_hidden_layers={fields.num_layers} entries, each of them dense or "
            "sparse"
        )
    num_dense = given.count("dense")
    if fields.has("first_k_dense_replace") and (
        fields.integer("first_k_dense_replace", least=0) != num_dense or "dense" in given[num_dense:]
    ):
        raise fields.impossible(
            f"first_k_dense_replace={fields.values['first_k_dense_replace']!r} contradicts mlp_layer_types, by which "
            f"{num_dense} layers are dense; absent, it means that the first layer is"
        )
    return [each == "sparse" for each in given]


FAMILY = Family(architecture="Glm4MoeLiteForCausalLM", model_type="glm4_moe_lite", parse=_parse)
