"""`PackedLayout`, the interface of quantized layouts, and functions that make a weight of integers, scales and zero points."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from inflight.errors import CheckpointError
from inflight.kernels.quantized_weight import GROUP_SIZE_MULTIPLE, QuantizedWeight, split_groups
from inflight.model_loader.weight_source import ShardSlices, StoredTensor

ALL = slice(None)
FLOATS = ("BF16", "F16", "F32")
_ROW_GROUP_SIZES = (128, 64, 32)  # a row with one scale is cut into groups of the first size that divides it


# Reads a part of one of a module's tensors. The first argument is the suffix in the tensor's name, "<module>.<suffix>".
ReadTensor = Callable[[str, ShardSlices], Tensor]


class PackedLayout(ABC):
    """The layout of one format of quantized safetensors: how the format divides the weight of a module among several tensors.
    Stateless.

    The methods get the module's tensors as `parts`, by suffix. They raise a `ValueError` that describes the problem; the caller
    adds the module's name.

    Attributes:
        values: the suffixes that the tensor of the integers may have.
        required: the suffixes that a quantized module must have.
        suffixes: all suffixes that a quantized module can have.
    """

    values: tuple[str, ...]
    required: tuple[str, ...]
    suffixes: tuple[str, ...]

    def lacking(self, parts: Mapping[str, StoredTensor]) -> list[str]:
        """The suffixes of tensors without which the module has no weight."""
        return [suffix for suffix in self.required if suffix not in parts]

    @abstractmethod
    def weight_shape(self, parts: Mapping[str, StoredTensor], read: ReadTensor) -> tuple[int, int]:
        """Returns (out_features, in_features), after a check of every dtype and shape. Reads no large tensor."""

    @abstractmethod
    def read(
        self, parts: Mapping[str, StoredTensor], shape: tuple[int, int], read: ReadTensor, start: int, stop: int
    ) -> QuantizedWeight | Tensor:
        """Reads rows `[start, stop)` of the weight, with all their columns. `shape` is the shape of the whole weight."""


def check(parts: Mapping[str, StoredTensor], suffix: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """Checks the dtype and shape of the tensor with this suffix, if there is one.

    Raises:
        ValueError: the tensor has another dtype or shape.
    """
    part = parts.get(suffix)
    if part is not None and (part.dtype not in dtypes or part.shape != shape):
        raise ValueError(f"{suffix} should be {' or '.join(dtypes)} {list(shape)}")


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] -> uint8 [rows, words * 32 / bits]. A word has 32 / bits unsigned numbers, lowest bits first."""
    packed = words.contiguous().view(torch.uint8)  # all supported machines are little-endian
    return unpack_nibbles(packed) if bits == 4 else packed


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 [rows, n] -> uint8 [rows, 2 * n], the low half of each byte first."""
    values = torch.empty(*packed.shape, 2, dtype=torch.uint8, device="cpu")
    torch.bitwise_and(packed, 15, out=values[..., 0])
    torch.bitwise_right_shift(packed, 4, out=values[..., 1])
    return values.flatten(-2)


def make_weight(
    values: Tensor, scales: Tensor, zero_points: Tensor, bits: int, group_index: Tensor | None = None
) -> QuantizedWeight | Tensor:
    """Makes weight[n, k] = scales[n, g] * (values[n, k] - zero_points[n, g]), where g is column k's group.

    The result is in floats if a `QuantizedWeight` cannot hold the groups: the columns of a group are not neighbours, or the
    size of the groups is not a multiple of 32, or of 16 with 8 bits.

    Args:
        values: uint8 [out_features, in_features], below 2**bits.
        scales, zero_points: float32 [out_features, num_groups].
        group_index: the group of each column, [in_features]. None: each group consists of neighbouring columns, and all
            groups have the same size.

    Raises:
        ValueError: a value of `group_index` is not in [0, num_groups).
    """
    num_columns = values.shape[1]
    num_groups = scales.shape[1]
    columns = torch.arange(num_columns, dtype=torch.int64, device="cpu")
    if group_index is None:
        group_index = columns // (num_columns // num_groups)
        in_order = True
    else:
        if bool(((group_index < 0) | (group_index >= num_groups)).any()):
            raise ValueError(f"its g_idx names groups outside [0, {num_groups}): the file is corrupt")
        evenly = num_columns % num_groups == 0
        in_order = evenly and bool((group_index == columns // (num_columns // num_groups)).all())
    middle = 2 ** (bits - 1)
    if num_groups == 1 and bits == 8 and bool((zero_points == middle).all()):
        return QuantizedWeight(values=(values ^ middle).view(torch.int8), scales=scales, offsets=None, bits=8)
    offsets = scales * zero_points
    group_size = num_columns // num_groups
    if in_order and num_groups == 1:
        group_size = next((size for size in _ROW_GROUP_SIZES if num_columns % size == 0), group_size)
    if in_order and group_size % GROUP_SIZE_MULTIPLE[bits] == 0:
        return split_groups(QuantizedWeight(values=values, scales=scales, offsets=offsets, bits=bits), group_size)
    group_index = group_index.long()
    return (values * scales[:, group_index]).sub_(offsets[:, group_index])


def shard_columns(weight: QuantizedWeight | Tensor, columns: slice, name: str) -> QuantizedWeight | Tensor:
    """Returns `columns` of a weight, for one tensor-parallel rank. If these columns begin or end inside a group, all groups are
    split into smaller ones.

    Raises:
        CheckpointError: the size of the smaller groups would not be a multiple of 32, or of 16 with 8 bits or a table.
    """
    total = weight.shape[1] if isinstance(weight, Tensor) else weight.values.shape[1]
    start, stop, _ = columns.indices(total)
    if (start, stop) == (0, total):
        return weight
    if isinstance(weight, Tensor):
        return weight[:, start:stop]
    if weight.is_symmetric:
        return replace(weight, values=weight.values[:, start:stop].contiguous())
    group_size = math.gcd(weight.group_size, start, stop)
    if weight.table and group_size % GROUP_SIZE_MULTIPLE[weight.bits]:
        weight = weight.without_table()  # a cut within a group may leave groups that are large enough for 8 bits
    multiple = GROUP_SIZE_MULTIPLE[weight.bits]
    if group_size % multiple:
        sizes = [str(n) for n in range(1, 65) if total % (n * multiple) == 0]
        raise CheckpointError(
            f"{name} has {total} columns in groups of {weight.group_size}, and a rank's part of {stop - start} is no multiple "
            f"of {multiple}: use a tensor_parallel_size of {' or '.join(sizes) or '1'}, or the plain checkpoint"
        )
    weight = split_groups(weight, group_size)
    groups = slice(start // group_size, stop // group_size)
    return weight.changed(weight.values[:, start:stop].contiguous(), lambda each: each[:, groups].contiguous())
