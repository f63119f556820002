"""How layers are divided among pipeline stages, and heads among tensor-parallel ranks. Pure functions of the architecture."""

from __future__ import annotations

from inflight.config.architecture import LayerSpec, ModelArchitecture
from inflight.errors import ConfigError

MAX_SIZES_SHOWN = 8

# The head (lm_head) is computed only for those tokens after which a token is drawn, here estimated as one of four. So a quarter
# of the head's weights count as its cost. If all its weights counted, the last stage would get too few layers. Then it would be
# idle for half of the time in which a prompt is computed.
TOKENS_PER_DRAWN_TOKEN = 4


def resolve_partition(text: str | None, architecture: ModelArchitecture, num_stages: int) -> tuple[int, ...]:
    """The number of layers of each stage. `text` is the user's choice, such as "8,8,6,6". If it is None, `partition_by_cost`
    chooses.

    Raises:
        ConfigError: there are fewer layers than stages, the numbers in `text` do not fit the model, or layers that must be in
            one stage are not.
    """
    partition = _choose_partition(text, architecture, num_stages)
    of_layer = [stage for stage, count in enumerate(partition) for _ in range(count)]
    for index, layer in enumerate(architecture.layers):
        owner = layer.mixer.kv_layer
        if owner is not None and of_layer[owner] != of_layer[index]:
            raise ConfigError(
                f"pipeline_parallel_size={num_stages}: layer {index} reads the keys and values of layer {owner}, so both must "
                f"be in one stage, but the layers of the stages are {','.join(map(str, partition))}; use fewer stages, or give "
                "another pipeline_layer_partition"
            )
    if architecture.token_inputs is not None and num_stages > 1:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages}: all layers of {architecture.name} read the embeddings of the tokens, which "
            "only the first stage has; use 1 (and tensor_parallel_size for several ranks)"
        )
    if architecture.vision is not None and architecture.vision.num_deepstack > partition[0]:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages}: features of images are added behind the first "
            f"{architecture.vision.num_deepstack} layers, so the first stage needs all of these, but the layers of the stages "
            f"are {','.join(map(str, partition))}; use fewer stages, or give another pipeline_layer_partition"
        )
    return partition


def _choose_partition(text: str | None, architecture: ModelArchitecture, num_stages: int) -> tuple[int, ...]:
    num_layers = architecture.num_layers
    if num_stages > num_layers:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages}, but the model has {num_layers} layers and a stage needs one: "
            f"use at most {num_layers}"
        )
    if text is None:
        drawn_head_cost = head_cost(architecture) // TOKENS_PER_DRAWN_TOKEN
        return partition_by_cost(num_layers, num_stages, layer_cost(architecture), drawn_head_cost)
    fields = text.split(",")
    counts = tuple(int(field) if field.strip().isdecimal() else 0 for field in fields)
    if len(counts) != num_stages or min(counts) < 1 or sum(counts) != num_layers:
        raise ConfigError(
            f"pipeline_layer_partition={text!r} must be {num_stages} numbers (one per stage), each at least 1, that add up to "
            f"the model's {num_layers} layers; correct it, or leave it out: then the layers are divided by cost"
        )
    return counts


def partition_by_cost(num_layers: int, num_stages: int, layer_cost: int, head_cost: int) -> tuple[int, ...]:
    """The partition whose most expensive stage costs least. The last stage computes the head, too.

    If several partitions have this lowest cost, the last stage gets as many layers as it can. The other stages share the other
    layers. If these cannot be split evenly, the first stages get one layer more.
    """
    if num_stages == 1:
        return (num_layers,)

    def slowest(last: int) -> int:
        most = -(-(num_layers - last) // (num_stages - 1))
        return max(most * layer_cost, last * layer_cost + head_cost)

    last = min(range(1, num_layers - num_stages + 2), key=lambda count: (slowest(count), -count))
    each, more = divmod(num_layers - last, num_stages - 1)
    return (*(each + (stage < more) for stage in range(num_stages - 1)), last)


def layer_cost(architecture: ModelArchitecture) -> int:
    """The number of weights in the matrices of one layer, on average."""
    weights = (layer.mixer.num_features + layer.mlp.num_features for layer in architecture.layers)
    return architecture.hidden_size * sum(weights) // architecture.num_layers


def head_cost(architecture: ModelArchitecture) -> int:
    """The number of weights of the head."""
    return architecture.hidden_size * architecture.vocab_size


def check_tensor_parallel_size(size: int, architecture: ModelArchitecture) -> None:
    """
    Raises:
        ConfigError: heads or the MLP cannot be divided among `size` ranks. The message names the sizes that work.
    """
    for layer in dict.fromkeys(architecture.layers):
        if _divides(size, layer):
            continue
        kinds = dict.fromkeys(architecture.layers)
        most = min(each.mixer.num_features for each in kinds)  # no layer has more parts to give to ranks
        dividing = (n for n in range(1, most + 1) if all(_divides(n, each) for each in kinds))
        sizes = list(map(str, dividing))
        more = ", ..." if len(sizes) > MAX_SIZES_SHOWN else ""
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide the model, which has {layer.mixer} and {layer.mlp}; "
            f"give one of the sizes that work: {', '.join(sizes[:MAX_SIZES_SHOWN])}{more}"
        )


def _divides(size: int, layer: LayerSpec) -> bool:
    return layer.mixer.fits(size) and layer.mlp.fits(size)
