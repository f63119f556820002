"""How much memory the weights of a GGUF file need, from its header."""

import math
from collections.abc import Mapping

from inflight.config.gguf_file import EMBEDDING, GgufTensor
from inflight.config.weight_room import gibibytes
from inflight.model_loader.gguf_blocks import GRIDS, UNPACKERS

_MORE = 1.25  # a type is named if it needs more than this times its bytes in the file


def mean_bits(tensors: Mapping[str, GgufTensor]) -> float | None:
    """The fewest bits that a weight of a linear layer has in memory, with its part of the scales, on average. Stored floats may
    be served as 16 bits. None if there are no such weights."""
    matrices = _matrices(tensors)
    total = sum(math.prod(tensor.shape) for tensor in matrices)
    if not total:
        return None
    return sum(min(16, tensor.type.bits_with_scales) * math.prod(tensor.shape) for tensor in matrices) / total


def memory_notice(tensors: Mapping[str, GgufTensor]) -> str | None:
    """A sentence about the types that need more memory than they have bytes in the file. None if there are none."""
    larger = [
        tensor
        for tensor in _matrices(tensors)
        if tensor.type.is_quantized
        and tensor.type.bits_in_memory * tensor.type.block_size > _MORE * 8 * tensor.type.block_bytes
    ]
    if not larger:
        return None
    names = {tensor.type.name for tensor in larger}
    text = (
        f"{len(larger)} tensors ({', '.join(sorted(names))}) have 8 bits for each weight in memory, because no kernel computes "
        f"with fewer of these types: {gibibytes(sum(math.prod(tensor.shape) for tensor in larger))}, in the file "
        f"{gibibytes(sum(tensor.num_bytes for tensor in larger))}"
    )
    if again := sorted(names - UNPACKERS.keys() - GRIDS.keys()):
        text += f"; {', '.join(again)} are quantized again, to 8 bits with a scale for each 32 weights"
    return text


def _matrices(tensors: Mapping[str, GgufTensor]) -> list[GgufTensor]:
    return [tensor for name, tensor in tensors.items() if len(tensor.shape) > 1 and name != EMBEDDING]
