"""Reads the fields of config.json that describe mixtures of experts, as several families call them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from inflight.config.architecture import LayerSpec
from inflight.config.experts import MoeSpec, RouterSpec
from inflight.config.families.family_fields import FamilyFields
from inflight.config.json_fields import JsonFields
from inflight.config.mixers import MixerSpec

# transformers writes the number of experts under one of two names, depending on the family and on its own release
NUM_EXPERTS = ("num_experts", "num_local_experts")
# What families call the number of experts, the number of those that compute a token, and their size
_ALL_NUMBERS = (*NUM_EXPERTS, "n_routed_experts", "moe_num_experts")
_ALL_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_ALL_SIZES = ("moe_intermediate_size",)
GGUF_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}  # keys of a file -> fields
GGUF_RENORMALIZES = {"expert_weights_norm": "norm_topk_prob"}  # the same
GGUF_GATED_EXPERTS = {  # the same, of experts with a shared one that has a gate
    **GGUF_EXPERTS,
    **GGUF_RENORMALIZES,
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# Of DeepSeek's experts: keys of a file -> fields. `routing_from_gguf` reads them, too.
GGUF_ROUTING = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_gating_func": "scoring_func",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
_GATING_FUNCTIONS = {1: "softmax", 2: "sigmoid"}  # numbers of the package gguf
# DeepSeek's name of the shared experts, which are one wide expert, and ours
SHARED_EXPERTS = (".shared_experts.", ".shared_expert.")


def read_experts(
    fields: FamilyFields,
    *,
    size: str = "moe_intermediate_size",
    names: Sequence[str] = NUM_EXPERTS,
    num_chosen: str = "num_experts_per_tok",
    renormalizes: bool | None = None,
    router: RouterSpec | None = None,
) -> MoeSpec:
    """The experts of a layer, without a shared one.

    Args:
        size: the field with the size of an expert.
        names: the fields with the number of experts, of which one must be there.
        num_chosen: the field with the number of experts that compute a token.
        renormalizes: see `RouterSpec`; None: the field norm_topk_prob says it.
        router: how experts are chosen; its `top_k` and `renormalizes` are not used. None: their scores are a softmax.

    Raises:
        UnsupportedModelError: a field is missing.
        ImpossibleFieldError: a field is impossible, or the number of experts has two values.
    """
    num_experts = _num_experts(fields, names)
    refuse_zero(fields, num_chosen, size)
    top_k = fields.integer(num_chosen)
    if top_k > num_experts:
        raise fields.impossible(f"{num_chosen}={top_k} is more than the number of experts, {num_experts}")
    if renormalizes is None:
        renormalizes = read_renormalizes(fields, default=False)
    router = replace(router or RouterSpec(top_k=top_k), top_k=top_k, renormalizes=renormalizes)
    if problem := router.problem(num_experts):
        given = f"n_group={router.num_groups}, topk_group={router.top_groups}, {num_chosen}={top_k}"
        given += f", {' or '.join(names)}={num_experts}"
        raise fields.impossible(f"{given}: {problem}")
    activation = fields.activation("hidden_act")
    return MoeSpec(num_experts=num_experts, size=fields.integer(size), router=router, activation=activation)


def refuse_zero(fields: JsonFields, *names: str) -> None:
    """For numbers with which transformers' code fails, or computes what no model has learned, if they are 0 or less."""
    for name in names:
        value = fields.values.get(name)
        if isinstance(value, (int, float)) and value <= 0:
            raise fields.impossible(f"{name}={value!r} is not a positive number")


def _num_experts(fields: FamilyFields, names: Sequence[str]) -> int:
    refuse_zero(fields, *names)
    found = {name: fields.integer(name) for name in names if fields.has(name)}
    if len(set(found.values())) > 1:
        raise fields.impossible(
            f"{' and '.join(f'{name}={value}' for name, value in found.items())} contradict each other: both are the number of "
            "experts; remove one"
        )
    return next(iter(found.values()), None) or fields.integer(names[0])


def check_experts(fields: JsonFields) -> None:
    """Refuses numbers of experts that no code can compute, of a family that only transformers knows. A list has a number for
    each layer. A model with at most one expert has no router.

    Raises:
        ImpossibleFieldError: see above.
    """
    names = [name for name in (*_ALL_NUMBERS, *_ALL_CHOSEN, *_ALL_SIZES) if fields.has(name)]
    given = {
        name: fields.integer(name, least=0) for name in names if not isinstance(fields.values[name], (list, tuple))
    }
    counts = [(given[name], name) for name in _ALL_NUMBERS if given.get(name, 0) > 1]
    for chosen in _ALL_CHOSEN:
        if counts and chosen in given and not 1 <= given[chosen] <= max(counts)[0]:
            count, name = max(counts)
            raise fields.impossible(f"{chosen}={given[chosen]} of {name}={count} experts cannot be chosen")


def read_renormalizes(fields: FamilyFields, *, default: bool) -> bool:
    """The field norm_topk_prob. null means no, as in transformers. If the field is absent, it is `default`."""
    return not fields.is_null("norm_topk_prob") and fields.boolean("norm_topk_prob", default)


def read_scale(fields: FamilyFields, default: float) -> float:
    """The field routed_scaling_factor. If it is absent, it is `default`."""
    refuse_null(fields, "routed_scaling_factor")
    refuse_zero(fields, "routed_scaling_factor")
    return fields.number("routed_scaling_factor", default)


def read_groups(fields: FamilyFields, router: RouterSpec, *, num_groups: int, top_groups: int) -> RouterSpec:
    """The same router with the groups of the fields n_group and topk_group. If a field is absent, it is `num_groups` or
    `top_groups`."""
    refuse_null(fields, "n_group", "topk_group")
    refuse_zero(fields, "n_group", "topk_group")
    return replace(
        router, num_groups=fields.integer("n_group", num_groups), top_groups=fields.integer("topk_group", top_groups)
    )


def with_shared_experts(
    fields: FamilyFields, experts: MoeSpec, default: int, *, name: str = "n_shared_experts", least: int = 1
) -> MoeSpec:
    """The same layer with as many shared experts as the field `name` says, which are stored as one wide expert. If the field is
    absent, there are `default`; `least` is 1, or 0 if there may be none."""
    refuse_null(fields, name)
    return replace(experts, shared_size=fields.integer(name, default, least=least) * experts.size)


def refuse_null(fields: FamilyFields, *names: str) -> None:
    """For fields whose default is wrong for most models: null says nothing, and transformers cannot compute it either."""
    for name in names:
        if fields.is_null(name):
            raise fields.impossible(
                f"{name}=null is not supported; give its value, or remove the field for its default"
            )


def refuse_other_values(fields: FamilyFields, **only: object) -> None:
    """Refuses fields that the family's class in transformers does not read, unless they say what it computes."""
    for name, value in only.items():
        if fields.has(name) and fields.values[name] != value:
            raise fields.impossible(f"{name}={fields.values[name]!r} is not supported for this family; {value!r} is")


def first_layers_dense(
    fields: FamilyFields,
    mixers: Sequence[MixerSpec],
    read: Callable[[FamilyFields], MoeSpec],
    *,
    name: str = "first_k_dense_replace",
    default: int,
    bias: bool = False,
) -> tuple[LayerSpec, ...]:
    """A layer for each mixer. The first ones, as many as the field `name` says (`default` if it is absent), have one MLP of
    size intermediate_size, with biases if `bias`. The others have the experts that `read` returns."""
    refuse_null(fields, name)
    num_dense = fields.integer(name, default, least=0)
    layers = [LayerSpec(mixer=mixer, mlp=fields.mlp(bias=bias)) for mixer in mixers[:num_dense]]
    if num_dense < len(mixers):
        experts = read(fields)
        layers += [LayerSpec(mixer=mixer, mlp=experts) for mixer in mixers[num_dense:]]
    return tuple(layers)


def sparse_layers(
    fields: FamilyFields, mixers: Sequence[MixerSpec], read: Callable[[FamilyFields], MoeSpec]
) -> tuple[LayerSpec, ...]:
    """A layer for each mixer. Every `decoder_sparse_step`-th layer has the experts that `read` returns, except for the layers
    that `mlp_only_layers` lists. The others have one MLP of size `intermediate_size`. If the number of experts is 0, all have.

    Raises:
        ImpossibleFieldError: one of these two fields is impossible.
    """
    refuse_zero(fields, "decoder_sparse_step")
    step = fields.integer("decoder_sparse_step", 1)
    given = fields.values.get("mlp_only_layers")
    dense = [] if given is None else given
    if not isinstance(dense, (list, tuple)) or not all(isinstance(index, int) and index >= 0 for index in dense):
        raise fields.impossible(f"mlp_only_layers={given!r} is not a list of the indices of layers")
    counts = [fields.values[name] for name in NUM_EXPERTS if fields.has(name)]
    are_none = bool(counts) and all(type(count) is int and count == 0 for count in counts)
    has_experts = [not are_none and index not in dense and (index + 1) % step == 0 for index in range(len(mixers))]
    experts = read(fields) if any(has_experts) else None
    return tuple(
        LayerSpec(mixer=mixer, mlp=experts if each and experts else fields.mlp())
        for mixer, each in zip(mixers, has_experts, strict=True)
    )


def drafting_layers(fields: FamilyFields) -> tuple[str, ...]:
    """The names of the layers behind the last one, which predict drafts (`ModelArchitecture.unread`). `blk`: in GGUF files."""
    num_layers = fields.num_layers
    count = fields.integer("num_nextn_predict_layers", 1, least=0)
    layers = range(num_layers, num_layers + count)
    return tuple(f"{layer}.{index}." for index in layers for layer in ("model.layers", "blk"))


def routing_from_gguf(given: Mapping[str, object]) -> dict[str, object]:
    """The fields of `GGUF_ROUTING` whose values a GGUF file writes in another way, or whose absence means something else there.
    It counts the layers that predict drafts among all layers."""
    count, drafting = given.get("block_count"), given.get("nextn_predict_layers", 0)
    found: dict[str, object] = {
        "routed_scaling_factor": given.get("expert_weights_scale") or 1.0,
        "norm_topk_prob": given.get("expert_weights_norm", False),
        "first_k_dense_replace": given.get("leading_dense_block_count", 0),
        "num_nextn_predict_layers": drafting,
    }
    found |= scoring_from_gguf(given)
    if isinstance(count, int) and isinstance(drafting, int):
        found["num_hidden_layers"] = count - drafting
    return found


def scoring_from_gguf(given: Mapping[str, object]) -> dict[str, object]:
    """The field scoring_func, if a GGUF file says it."""
    function = given.get("expert_gating_func")
    if function is None:
        return {}
    return {"scoring_func": _GATING_FUNCTIONS.get(function, function) if isinstance(function, int) else function}
