"""How many bytes a rank's weights need, and whether the weights and the KV cache fit. Computed before a weight is read."""

from __future__ import annotations

from dataclasses import astuple

from inflight.config.architecture import DTYPE_BYTES, TRANSFORMERS, LayerSpec, ShortConvSpec
from inflight.config.engine import ModelConfig, ParallelConfig
from inflight.config.pipeline_stage import pipeline_stage
from inflight.config.weight_format import PLAIN
from inflight.errors import OutOfMemoryError

_SCALE_BYTES, _GROUP_BYTES = 4, 4  # a row has one float32 scale; a group has a scale and an offset in half precision
_LARGEST_GROUP = 128  # the group size that is assumed for quantized checkpoints


def weight_bytes(model: ModelConfig, parallel: ParallelConfig, pp_rank: int) -> int:
    """The bytes of one rank's weights, from the config alone.

    Linear weights of a quantized checkpoint count as 4 bits each, the smallest size that is supported. So a model that fits is
    never refused.
    """
    architecture, tp_size = model.architecture, parallel.tensor_parallel_size
    stage = pipeline_stage(parallel.pipeline_layer_partition, pp_rank)
    itemsize, hidden_size = DTYPE_BYTES[model.dtype], architecture.hidden_size
    is_quantized = model.load_format == "gguf" or (model.load_format != "dummy" and architecture.weight_format != PLAIN)
    if architecture.implementation == TRANSFORMERS:  # the shapes of its layers are not known yet
        return architecture.vocab_size * hidden_size * itemsize
    inputs = architecture.token_inputs
    input_size = 0 if inputs is None else inputs.size
    layers, head, group_size = model.quantization.layers, model.quantization.head, model.quantization.group_size
    shares_table = architecture.tie_word_embeddings and stage.is_first and head is None
    if is_quantized:
        layers, head, group_size = "int4", "int4", _LARGEST_GROUP
    total = sum(
        _layer_bytes(layer, hidden_size, input_size, tp_size, layers, group_size, itemsize)
        for layer in architecture.layers[stage.start : stage.stop]
    )
    table = -(-architecture.vocab_size // tp_size), hidden_size  # rows and columns of the embedding, and of the head
    if stage.is_first:
        total += _linear_bytes(*table, None, 0, itemsize)
    if inputs is not None:
        width = architecture.num_layers * inputs.size
        total += _linear_bytes(-(-inputs.vocab_size // tp_size), width, None, 0, itemsize) + inputs.size * itemsize
        total += _linear_bytes(width, hidden_size, layers, group_size, itemsize)
    if stage.is_last:
        total += hidden_size * itemsize  # the norm
        total += 0 if shares_table else _linear_bytes(*table, head, group_size, itemsize)
    return total


def check_weights_fit(
    num_bytes: int, *, budget_bytes: int, free_bytes: int, total_bytes: int, memory_utilization: float
) -> None:
    """
    Args:
        num_bytes: the result of `weight_bytes`.
        budget_bytes: the part of the GPU's memory that the rank may use.
        free_bytes, total_bytes: the GPU's free and total memory before anything is loaded.

    Raises:
        OutOfMemoryError: the weights alone are more than the budget.
    """
    if num_bytes <= budget_bytes:
        return
    ways = ["set quantization", "raise tensor_parallel_size or pipeline_parallel_size"]
    if num_bytes < min(free_bytes, total_bytes):
        ways.insert(0, f"raise gpu_memory_utilization={memory_utilization:g}")
    if num_bytes < total_bytes and free_bytes < memory_utilization * total_bytes:
        ways.insert(0, "end other programs that use the GPU")
    raise OutOfMemoryError(
        f"the weights of a rank are {_gib(num_bytes)}, but the engine may use {_gib(budget_bytes)} of its GPU, which has "
        f"{_gib(total_bytes)}, {_gib(free_bytes)} of them free (gpu_memory_utilization={memory_utilization:g}); "
        f"{', '.join(ways)}, or use a larger GPU"
    )


def check_kv_cache_fits(memory_bytes: int, *, weight_bytes: int, num_sharing: int, free_bytes: int) -> None:
    """
    Args:
        memory_bytes: what `kv_cache_memory_bytes` asks for on each rank.
        weight_bytes: size of the weights of a rank.
        num_sharing: number of ranks that share the memory.
        free_bytes: free memory before anything is loaded.

    Raises:
        OutOfMemoryError: the memory cannot hold the weights and a cache of this size.
    """
    if num_sharing * (memory_bytes + weight_bytes) <= free_bytes:
        return
    room = free_bytes // num_sharing - weight_bytes
    ways = [f"lower it to {_gib(room)} at most", "free memory"] if room > 0 else ["free memory", "use a smaller model"]
    sharing = f", which {num_sharing} ranks share" if num_sharing > 1 else ""
    raise OutOfMemoryError(
        f"kv_cache_memory_bytes={memory_bytes} (--kv-cache-memory-bytes) asks for a KV cache of {_gib(memory_bytes)} beside "
        f"{_gib(weight_bytes)} of weights, but only {_gib(free_bytes)} of memory is free{sharing}; {ways[0]}, {ways[1]}, or "
        "do not set kv_cache_memory_bytes: then the engine chooses a size that fits into the free memory"
    )


def _layer_bytes(
    layer: LayerSpec,
    hidden_size: int,
    input_size: int,
    tp_size: int,
    quantization: str | None,
    group_size: int,
    itemsize: int,
) -> int:
    mixer, mlp = layer.mixer, layer.mlp
    (width, inner), mlp_size = mixer.rank_sizes(tp_size), mlp.size // tp_size
    products = [(width, hidden_size), (hidden_size, inner), (2 * mlp_size, hidden_size), (hidden_size, mlp_size)]
    if input_size:
        products += [(input_size, hidden_size), (hidden_size, input_size)]
    total = sum(_linear_bytes(*shape, quantization, group_size, itemsize) for shape in products)
    plain = sum(name is not None for name in astuple(layer.norms)) * hidden_size
    plain += hidden_size if input_size else 0
    if (attention := layer.attention) is not None:
        plain += width * attention.qkv_bias + hidden_size * attention.output_bias
        if attention.latent is not None:
            queries, keys_and_values, norms = attention.latent.inner_sizes(attention.num_heads // tp_size)
            total += _linear_bytes(queries, 1, quantization, group_size, itemsize)
            plain += keys_and_values + norms
        kv_size = (width - inner * (2 if attention.has_gate else 1)) // 2
        plain += inner + kv_size if attention.qk_norm is not None else 0
        plain += kv_size if attention.has_value_norm else 0
    if mlp.bias:
        plain += 2 * mlp_size + hidden_size
    if isinstance(layer.recurrence, ShortConvSpec) and layer.recurrence.bias:
        plain += width + hidden_size
    total += layer.recurrence.num_float32(tp_size) * 4 if layer.recurrence is not None else 0
    total += 4 if layer.has_scalar else 0
    return total + plain * itemsize


def _linear_bytes(out_features: int, in_features: int, quantization: str | None, group_size: int, itemsize: int) -> int:
    if quantization is None:
        return out_features * in_features * itemsize
    if quantization == "int4":
        return out_features * (in_features // 2 + in_features // group_size * _GROUP_BYTES)
    return out_features * (in_features + _SCALE_BYTES)  # "int8", "fp8"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
