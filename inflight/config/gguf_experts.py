"""`check_experts`: compares what the metadata of a GGUF file says of its experts with the shapes of its tensors.

The loader would refuse such a file, too, but by the names of tensors: it cannot know which key is wrong.
"""

import re
from collections.abc import Mapping

from inflight.config.gguf_file import GgufFile, GgufTensor

_COUNT = "expert_count"
_SIZE = "expert_feed_forward_length"
_SHARED = "expert_shared_count"
_SHARED_SIZE = "expert_shared_feed_forward_length"  # of one of them or of all, depending on the architecture
_FIRST = "leading_dense_block_count"
_EXPERTS = re.compile(r"blk\.(0|[1-9][0-9]*)\.ffn_down_exps\.weight")
_SHARED_EXPERT = re.compile(r"blk\.(0|[1-9][0-9]*)\.ffn_down_shexp\.weight")


def check_experts(file: GgufFile, prefix: str, given: Mapping[str, object]) -> None:
    """
    Args:
        prefix: of the keys, with its dot.
        given: key without prefix -> value. Values that are no integers are not compared.

    Raises:
        UnsupportedModelError: a key contradicts a tensor.
    """
    experts = _matrices(file, _EXPERTS, num_dimensions=3)
    shared = _matrices(file, _SHARED_EXPERT, num_dimensions=2)

    def compare(key: str, name: str, found: int, what: str) -> None:
        value = given.get(key)
        if type(value) is int and value != found:
            raise file.refusal(f"{prefix}{key}={value} contradicts {name}, which has {what}; one of them is wrong")

    for name, tensor in experts.values():
        num_experts = tensor.shape[0]
        size = tensor.shape[2]
        compare(_COUNT, name, num_experts, f"{num_experts} experts")
        compare(_SIZE, name, size, f"experts of size {size}")
    if experts:
        first = min(experts)
        name = experts[first][0]
        compare(_FIRST, name, first, f"the first experts of the file, in layer {first}")
    for index, (name, tensor) in shared.items():
        if index in experts and _SHARED_SIZE not in given:
            size_of_one = experts[index][1].shape[2]
            num_shared = tensor.shape[1] // size_of_one
            compare(_SHARED, name, num_shared, f"{num_shared} shared experts of size {size_of_one}")


def _matrices(file: GgufFile, pattern: re.Pattern[str], num_dimensions: int) -> dict[int, tuple[str, GgufTensor]]:
    """Layer -> the name and the tensor. Those with another number of dimensions are left to the loader."""
    found: dict[int, tuple[str, GgufTensor]] = {}
    for name, tensor in file.tensors.items():
        match = pattern.fullmatch(name)
        if match is not None and len(tensor.shape) == num_dimensions:
            found[int(match[1])] = (name, tensor)
    return found
