"""Reads the fields of config.json that describe mixtures of experts, as several families call them."""

from collections.abc import Sequence

from inflight.config.architecture import LayerSpec
from inflight.config.experts import MoeSpec, RouterSpec
from inflight.config.families.family_fields import FamilyFields
from inflight.config.mixers import MixerSpec

# transformers writes the number of experts under one of two names, depending on the family and on its own release
NUM_EXPERTS = ("num_experts", "num_local_experts")
GGUF_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}  # keys of a file -> fields
GGUF_RENORMALIZES = {"expert_weights_norm": "norm_topk_prob"}  # the same


def read_experts(
    fields: FamilyFields, *, size: str = "moe_intermediate_size", renormalizes: bool | None = None
) -> MoeSpec:
    """The experts of a layer, without a shared one. Their scores are a softmax.

    Args:
        size: the field with the size of an expert.
        renormalizes: see `RouterSpec`; None: the field norm_topk_prob says it.

    Raises:
        UnsupportedModelError: a field is missing or impossible, or the number of experts has two values.
    """
    num_experts = _num_experts(fields)
    top_k = fields.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise fields.refusal(f"num_experts_per_tok={top_k} is more than the number of experts, {num_experts}")
    if renormalizes is None:
        renormalizes = fields.boolean("norm_topk_prob", False)
    return MoeSpec(
        num_experts=num_experts,
        size=fields.integer(size),
        router=RouterSpec(top_k=top_k, renormalizes=renormalizes),
        activation=fields.mlp().activation,
    )


def _num_experts(fields: FamilyFields) -> int:
    found = {name: fields.integer(name) for name in NUM_EXPERTS if fields.has(name)}
    if len(set(found.values())) > 1:
        raise fields.refusal(
            f"{' and '.join(f'{name}={value}' for name, value in found.items())} contradict each other: both are the number of "
            "experts; remove one"
        )
    return next(iter(found.values()), None) or fields.integer(NUM_EXPERTS[0])


def sparse_layers(fields: FamilyFields, mixers: Sequence[MixerSpec], experts: MoeSpec) -> tuple[LayerSpec, ...]:
    """A layer for each mixer. Every `decoder_sparse_step`-th layer has experts, except for the layers that `mlp_only_layers`
    lists. The others have one MLP of size `intermediate_size`.

    Raises:
        UnsupportedModelError: one of these two fields is impossible.
    """
    step = fields.integer("decoder_sparse_step", 1)
    given = fields.values.get("mlp_only_layers")
    dense = [] if given is None else given
    if not isinstance(dense, (list, tuple)) or not all(isinstance(index, int) and index >= 0 for index in dense):
        raise fields.refusal(f"mlp_only_layers={given!r} is not a list of the indices of layers")
    layers = []
    for index, mixer in enumerate(mixers):
        has_experts = index not in dense and (index + 1) % step == 0
        layers.append(LayerSpec(mixer=mixer, mlp=experts if has_experts else fields.mlp()))
    return tuple(layers)
