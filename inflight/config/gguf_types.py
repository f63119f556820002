"""The types of tensors in GGUF files, from the package `gguf` (github.com/ggml-org/llama.cpp).

No other file imports the package, and this one only when a GGUF file is opened.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from inflight.errors import ConfigError

_IN_FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4")  # in memory; the other quantized types have 8
_IN_GROUPS_OF_16 = (
    "IQ1_M",
    "IQ2_S",
    "IQ2_XS",
    "NVFP4",
    "Q2_K",
    "Q3_K",
    "Q6_K",
)  # in memory; the others have groups of 32
_WITH_OFFSETS = ("Q2_K", "Q4_1", "Q4_K", "Q5_1", "Q5_K")


@dataclass(frozen=True)
class GgufType:
    """A tensor type: `block_bytes` hold `block_size` neighbouring weights of a row."""

    name: str
    block_size: int
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        return self.block_size > 1

    @property
    def bits_in_memory(self) -> int:
        """The bits of a weight in memory, without scales. model_loader/gguf_blocks.py says which form each type gets."""
        if not self.is_quantized:
            return 8 * self.block_bytes
        return 4 if self.name in _IN_FOUR_BITS else 8

    @property
    def bits_with_scales(self) -> float:
        """The bits of a weight in memory, with its part of the scales and offsets of groups, which have 16 bits each."""
        if not self.is_quantized:
            return self.bits_in_memory
        group_size = 16 if self.name in _IN_GROUPS_OF_16 else 32
        return self.bits_in_memory + 16 / group_size * (2 if self.name in _WITH_OFFSETS else 1)


@cache
def gguf_types() -> dict[int, GgufType]:
    """The types that are read, by their numbers in the file: those of which the package can compute the weights.

    Raises:
        ConfigError: the package is not installed.
    """
    found = {}
    for kind, (block_size, block_bytes) in _package().GGML_QUANT_SIZES.items():
        tensor_type = GgufType(kind.name, block_size, block_bytes)
        try:
            dequantize(tensor_type, np.zeros((1, block_bytes), np.uint8))
        except NotImplementedError:
            continue
        found[kind.value] = tensor_type
    return found


def type_name(number: int) -> str:
    """The name of any type; "type 99" if the package does not know the type."""
    names: dict[int, str] = {kind.value: kind.name for kind in _package().GGMLQuantizationType}
    return names.get(number, f"type {number}")


def dequantize(tensor_type: GgufType, rows: np.ndarray) -> np.ndarray:
    """uint8 [num_rows, bytes of a row] -> float32 [num_rows, in_features]."""
    package = _package()
    weights: np.ndarray = package.dequantize(rows, package.GGMLQuantizationType[tensor_type.name])
    return weights


def lookup_table(type_name: str) -> np.ndarray:
    """The integers that the sixteen values of 4 bits stand for, in a type that has such a table: int16 [16]."""
    return np.array(getattr(_package(), type_name).kvalues, np.int16)


def _package() -> Any:  # Any: its types are not checked, because that takes long
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ConfigError(f"GGUF files need the package {error.name!r}: pip install '{error.name}'") from error
    return gguf
