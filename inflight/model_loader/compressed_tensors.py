"""The layouts of compressed-tensors with integers of 4 and 8 bits, as llm-compressor writes them.

weight_packed      int32 [out_features, in_features * bits / 32, rounded up]     format "pack-quantized"
weight             int8  [out_features, in_features]                             format "int-quantized"
weight_shape       int   [2]                                                     the shape of a packed weight
weight_scale       float [out_features, num_groups], [out_features] or [1]
weight_zero_point  int8, in the shape of weight_scale                            not packed
                   int32 [out_features * bits / 32, rounded up, num_groups]      packed
weight_g_idx       int32 [in_features]                                           the group of each input ("actorder": "group")

The integers in packed tensors have 2**(bits - 1) added, so that they are not negative.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.model_loader.packing import ALL, FLOATS, PackedLayout, ReadTensor, check, make_weight, unpack_words
from inflight.model_loader.weight_source import StoredTensor


class CompressedTensors(PackedLayout):
    values = ("weight_packed", "weight")
    required = ("weight_scale",)
    suffixes = ("weight_scale", "weight_packed", "weight", "weight_shape", "weight_zero_point", "weight_g_idx")

    def lacking(self, parts: Mapping[str, StoredTensor]) -> list[str]:
        values = ("weight_packed", "weight_shape") if parts.keys() & {"weight_packed", "weight_shape"} else ("weight",)
        return [suffix for suffix in (*self.required, *values) if suffix not in parts]

    def weight_shape(self, parts: Mapping[str, StoredTensor], read: ReadTensor) -> tuple[int, int]:
        if "weight" in parts and "weight_packed" in parts:
            raise ValueError("it should have either weight, or weight_packed and weight_shape")
        if "weight_shape" in parts:
            check(parts, "weight_shape", ("I64", "I32"), (2,))
            out_features, in_features = (int(size) for size in read("weight_shape", (ALL,)))
        else:
            out_features, in_features = (*parts["weight"].shape, 0, 0)[:2]
        if out_features < 1 or in_features < 1:
            raise ValueError("the weight should have two dimensions and not be empty")
        bits = _bits(parts, in_features)
        check(parts, "weight_packed", ("I32",), (out_features, -(-in_features * bits // 32)))
        check(parts, "weight", ("I8",), (out_features, in_features))
        num_groups = (*parts["weight_scale"].shape, 1)[1] if len(parts["weight_scale"].shape) == 2 else 1
        if parts["weight_scale"].shape not in ((out_features, num_groups), (out_features,), (1,)):
            raise ValueError(f"weight_scale should have the shape [{out_features}, groups], [{out_features}] or [1]")
        check(parts, "weight_scale", FLOATS, parts["weight_scale"].shape)
        if _has_packed_zero_points(parts):
            check(parts, "weight_zero_point", ("I32",), (-(-out_features * bits // 32), num_groups))
        else:
            check(parts, "weight_zero_point", ("I8",), parts["weight_scale"].shape)
        check(parts, "weight_g_idx", ("I32", "I64"), (in_features,))
        if num_groups < 1 or in_features % num_groups:
            raise ValueError(f"{in_features} input features cannot be divided into {num_groups} equal groups")
        return out_features, in_features

    def read(
        self, parts: Mapping[str, StoredTensor], shape: tuple[int, int], read: ReadTensor, start: int, stop: int
    ) -> QuantizedWeight | Tensor:
        num_rows, num_columns = shape
        bits = _bits(parts, num_columns)
        rows = slice(start, stop)
        if "weight_packed" in parts:
            values = unpack_words(read("weight_packed", (rows, ALL)), bits)[:, :num_columns].contiguous()
        else:
            values = read("weight", (rows, ALL)).view(torch.uint8) ^ 128  # int8 -> uint8, with 128 added
        scales = _read_column(parts, read, "weight_scale", num_rows)[rows].to(torch.float32)
        if "weight_zero_point" not in parts:
            zero_points = torch.full_like(scales, 2 ** (bits - 1))
        elif _has_packed_zero_points(parts):
            words = read("weight_zero_point", (ALL, ALL))
            zero_points = unpack_words(words.t(), bits).t()[rows].to(torch.float32)
        else:
            stored = _read_column(parts, read, "weight_zero_point", num_rows)[rows]
            zero_points = stored.to(torch.float32) + 2 ** (bits - 1)
        group_index = read("weight_g_idx", (ALL,)) if "weight_g_idx" in parts else None
        if group_index is not None and bool((group_index == -1).all()):  # -1 everywhere: the groups are in order
            group_index = None
        return make_weight(values, scales, zero_points, bits, group_index)


def _bits(parts: Mapping[str, StoredTensor], in_features: int) -> int:
    """Returns how many bits an integer of the weight has. It is 8 if the file stores one integer per byte. Otherwise it follows
    from the number of words in a row."""
    if "weight" in parts:
        return 8
    num_words = parts["weight_packed"].shape[-1]
    for bits in (4, 8):
        if num_words == -(-in_features * bits // 32):
            return bits
    raise ValueError(
        f"weight_packed has {num_words} words of 32 bits in a row for {in_features} input features; this is neither 4 nor "
        "8 bits for each, and only these are supported"
    )


def _has_packed_zero_points(parts: Mapping[str, StoredTensor]) -> bool:
    return "weight_packed" in parts and parts.get("weight_zero_point", parts["weight_scale"]).dtype == "I32"


def _read_column(parts: Mapping[str, StoredTensor], read: ReadTensor, suffix: str, num_rows: int) -> Tensor:
    """Reads scales or zero points as [num_rows, num_groups]. The file may have one for the whole weight, one per row, or one
    per row and group."""
    tensor = read(suffix, (ALL,) * len(parts[suffix].shape))
    return tensor.reshape(len(tensor), -1).expand(num_rows, -1)
