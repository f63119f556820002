"""`PackedLayout`: how one format of quantized safetensors divides a weight among tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from inflight.layers.quantized_weight import QuantizedWeight
from inflight.model_loader.packing import unpack_words
from inflight.model_loader.weight_source import Held, StoredTensor

ALL = slice(None)
FLOATS = ("BF16", "F16", "F32")


class ReadTensor(Protocol):
    """Reads a part of the module's tensor of that suffix."""

    def __call__(self, suffix: str, part: Held) -> Tensor: ...


class PackedLayout(ABC):
    """Stateless. `ValueError`s of its methods say what is wrong, and get the module's name from who calls.

    Attributes:
        marker: the suffix that only a quantized module has.
        required: suffixes that such a module must have, `marker` among them.
        suffixes: all that it may have.
    """

    marker: str
    required: tuple[str, ...]
    suffixes: tuple[str, ...]

    @abstractmethod
    def weight_shape(self, parts: Mapping[str, StoredTensor], read: ReadTensor) -> tuple[int, int]:
        """(out_features, in_features), after a check of every dtype and shape. No large tensor is read."""

    @abstractmethod
    def read(
        self, parts: Mapping[str, StoredTensor], shape: tuple[int, int], read: ReadTensor, start: int, stop: int
    ) -> QuantizedWeight | Tensor:
        """Rows `[start, stop)` of the weight, whose whole shape is `shape`, with all their columns."""


def check(parts: Mapping[str, StoredTensor], suffix: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """
    Raises:
        ValueError: the tensor of that suffix, if there is one, is another.
    """
    part = parts.get(suffix)
    if part is not None and (part.dtype not in dtypes or part.shape != shape):
        raise ValueError(f"{suffix} should be {' or '.join(dtypes)} {list(shape)}")


def read_packed_columns(read: ReadTensor, suffix: str, bits: int, start: int, stop: int) -> Tensor:
    """Columns `[start, stop)` of an int32 tensor whose words hold neighbouring columns: uint8 [rows, stop - start]."""
    per_word = 32 // bits
    first = start // per_word
    words = read(suffix, (ALL, slice(first, -(-stop // per_word))))
    return unpack_words(words, bits)[:, start - first * per_word : stop - first * per_word]


def check_group_index(group_index: Tensor, num_groups: int) -> Tensor:
    """
    Raises:
        ValueError: it names groups that there are none of.
    """
    if bool(((group_index < 0) | (group_index >= num_groups)).any()):
        raise ValueError(f"its g_idx names groups outside [0, {num_groups}): the file is corrupt")
    return group_index


def as_scales(scales: Tensor) -> Tensor:
    """[num_groups, rows] -> float32 [rows, num_groups]."""
    return scales.t().to(torch.float32).contiguous()
