"""GPTQ's layout, of 4 and 8 bits, as AutoGPTQ and GPTQModel write it.

    qweight  int32 [in_features / n, out_features]   n = 32 / bits: word j of a column holds rows n*j ... n*j + n-1
    qzeros   int32 [num_groups, out_features / n]    words hold neighbouring columns
    scales   float [num_groups, out_features]
    g_idx    int32 [in_features]                     each input's group; with "act order" (desc_act) in no order

In version 1 ("checkpoint_format": "gptq") zero points are stored less one, in version 2 ("gptq_v2") as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from inflight.layers.quantized_weight import QuantizedWeight
from inflight.model_loader.packed_layout import (
    ALL,
    FLOATS,
    PackedLayout,
    ReadTensor,
    as_scales,
    check,
    check_group_index,
    read_packed_columns,
)
from inflight.model_loader.packing import make_weight, unpack_words
from inflight.model_loader.weight_source import StoredTensor


class Gptq(PackedLayout):
    """`stored_zero_offset`: what is to be added to stored zero points."""

    marker = "qweight"
    required = ("qweight", "qzeros", "scales")
    suffixes = (*required, "g_idx")

    def __init__(self, stored_zero_offset: int) -> None:
        self._stored_zero_offset = stored_zero_offset

    def weight_shape(self, parts: Mapping[str, StoredTensor], read: ReadTensor) -> tuple[int, int]:
        bits = _bits(parts)
        words, out_features = parts["qweight"].shape
        num_groups, in_features = parts["scales"].shape[0], words * 32 // bits
        check(parts, "qweight", ("I32",), (words, out_features))
        check(parts, "qzeros", ("I32",), (num_groups, out_features * bits // 32))
        check(parts, "scales", FLOATS, (num_groups, out_features))
        check(parts, "g_idx", ("I32",), (in_features,))
        if "g_idx" not in parts and in_features % num_groups:
            raise ValueError(
                f"{in_features} input features are not divided by {num_groups} groups, and there is no g_idx"
            )
        return out_features, in_features

    def read(
        self, parts: Mapping[str, StoredTensor], shape: tuple[int, int], read: ReadTensor, start: int, stop: int
    ) -> QuantizedWeight | Tensor:
        bits = _bits(parts)
        scales = as_scales(read("scales", (ALL, slice(start, stop))))
        values = unpack_words(read("qweight", (ALL, slice(start, stop))).t(), bits)
        zero_points = read_packed_columns(read, "qzeros", bits, start, stop).t()
        group_index = read("g_idx", (ALL,)) if "g_idx" in parts else None
        if group_index is not None:
            group_index = check_group_index(group_index, scales.shape[1])
        return make_weight(values, scales, self._zero_points(zero_points, bits), bits, group_index)

    def _zero_points(self, stored: Tensor, bits: int) -> Tensor:
        # Some writers say version 1 and store version 2: they are known by weights that are symmetric throughout
        # (https://github.com/vllm-project/vllm/pull/38966).
        if self._stored_zero_offset == 0 or bool((stored == 2 ** (bits - 1)).all()):
            return stored.to(torch.float32)
        zero_points: Tensor = (stored.int() + self._stored_zero_offset) & (2**bits - 1)  # 0 is stored as -1
        return zero_points.to(torch.float32)


def _bits(parts: Mapping[str, StoredTensor]) -> int:
    """By how much narrower the zero points are than the scales."""
    if any(len(parts[suffix].shape) != 2 or 0 in parts[suffix].shape for suffix in Gptq.required):
        raise ValueError("qweight, qzeros and scales should have two dimensions, and something in them")
    bits = 32 * parts["qzeros"].shape[1] / parts["scales"].shape[1]
    if bits not in (4, 8):
        raise ValueError(f"it has {bits:g} bits, and 4 or 8 are read")
    return int(bits)
