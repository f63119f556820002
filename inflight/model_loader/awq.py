"""AWQ's layout "gemm", as AutoAWQ writes it: 4 bits with zero points.

    qweight  int32 [in_features, out_features / 8]
    qzeros   int32 [num_groups, out_features / 8]
    scales   float [num_groups, out_features]

A word holds eight neighbouring columns, from its lowest bits up in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from inflight.layers.quantized_weight import QuantizedWeight
from inflight.model_loader.packed_layout import ALL, FLOATS, PackedLayout, ReadTensor, as_scales, check
from inflight.model_loader.packing import make_weight, unpack_words
from inflight.model_loader.weight_source import StoredTensor

_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of each of its eight columns
_BITS = 4


class Awq(PackedLayout):
    marker = "qweight"
    required = ("qweight", "qzeros", "scales")
    suffixes = required

    def weight_shape(self, parts: Mapping[str, StoredTensor], read: ReadTensor) -> tuple[int, int]:
        if any(len(part.shape) != 2 or 0 in part.shape for part in parts.values()):
            raise ValueError("qweight, qzeros and scales should have two dimensions, and something in them")
        in_features, words = parts["qweight"].shape
        num_groups, out_features = parts["scales"].shape[0], words * 8
        check(parts, "qweight", ("I32",), (in_features, words))
        check(parts, "qzeros", ("I32",), (num_groups, words))
        check(parts, "scales", FLOATS, (num_groups, out_features))
        if in_features % num_groups:
            raise ValueError(f"{in_features} input features are not divided by {num_groups} groups")
        return out_features, in_features

    def read(
        self, parts: Mapping[str, StoredTensor], shape: tuple[int, int], read: ReadTensor, start: int, stop: int
    ) -> QuantizedWeight | Tensor:
        scales = as_scales(read("scales", (ALL, slice(start, stop))))
        values, zero_points = (_read_columns(read, suffix, start, stop) for suffix in ("qweight", "qzeros"))
        return make_weight(values.t().contiguous(), scales, zero_points.t().to(torch.float32), _BITS)


def _read_columns(read: ReadTensor, suffix: str, start: int, stop: int) -> Tensor:
    """uint8 [rows, stop - start]."""
    first = start // 8
    words = read(suffix, (ALL, slice(first, -(-stop // 8))))
    columns = unpack_words(words, _BITS).view(len(words), -1, 8)[..., list(_POSITIONS)].flatten(1)
    return columns[:, start - first * 8 : stop - first * 8]
