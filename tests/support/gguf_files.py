"""GGUF files written by hand, after the format's description and nothing of the reader's code.

    write_gguf(path, {"general.architecture": "llama", "llama.block_count": Number("I", 2)}, {"x.weight": floats(tensor)})

Blocks are packed one weight at a time; `Stored.weight` is what they stand for, computed in float64.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_NUMBER_TYPES = {"B": 0, "b": 1, "H": 2, "h": 3, "I": 4, "i": 5, "f": 6, "?": 7, "Q": 10, "q": 11, "d": 12}


@dataclass(frozen=True)
class Number:
    """A number, or an array of them, of the type that `struct` writes with this letter."""

    kind: str
    value: float | Sequence[float]


@dataclass(frozen=True)
class Stored:
    """A tensor: its type's number, its bytes, and the weight they stand for."""

    kind: int
    data: bytes
    weight: Tensor


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_text(each) for each in value)
    assert isinstance(value, Number)
    kind = _NUMBER_TYPES[value.kind]
    if isinstance(value.value, (int, float)):
        return struct.pack(f"<I{value.kind}", kind, value.value)
    return struct.pack(f"<IIQ{len(value.value)}{value.kind}", 9, kind, len(value.value), *value.value)


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Mapping[str, Stored], *, version: int = 3, alignment: int = 32
) -> bytes:
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += _text(key) + _value(value)
    offset = 0
    for name, stored in tensors.items():
        shape = stored.weight.shape
        out += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), stored.kind, offset)
        offset += -(-len(stored.data) // alignment) * alignment
    for stored in tensors.values():
        out += bytes(-len(out) % alignment) + stored.data
    return out


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


def write_parts(
    folder: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored], count: int, stem: str = "model"
) -> list[Path]:
    """The same model, split over `count` files as by llama-gguf-split. The first has all metadata."""
    names = list(tensors)
    paths = []
    for number in range(count):
        split = {
            "split.no": Number("H", number),
            "split.count": Number("H", count),
            "split.tensors.count": Number("i", len(tensors)),
        }
        own = names[number * len(names) // count : (number + 1) * len(names) // count]
        path = folder / f"{stem}-{number + 1:05}-of-{count:05}.gguf"
        paths.append(
            write_gguf(path, {**(metadata if number == 0 else {}), **split}, {name: tensors[name] for name in own})
        )
    return paths


def floats(weight: Tensor) -> Stored:
    """F32, F16 or BF16, as the tensor is."""
    kind = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}[weight.dtype]
    return Stored(kind, weight.contiguous().view(torch.uint8).numpy().tobytes(), weight)


# ---- quantized types: `random` -> (bytes of one block, its weights) ----------------------------------------------------

Block = tuple[bytes, list[float]]


def _scale(random: np.random.Generator) -> float:
    """A multiple of 2**-10, exact in float16."""
    return int(random.integers(1, 17)) / 1024


def _q4_0(random: np.random.Generator) -> Block:
    d, q = _scale(random), random.integers(0, 16, 32).tolist()
    packed = bytes(q[i] | q[i + 16] << 4 for i in range(16))
    return struct.pack("<e", d) + packed, [d * (each - 8) for each in q]


def _q4_1(random: np.random.Generator) -> Block:
    d, m, q = _scale(random), -_scale(random), random.integers(0, 16, 32).tolist()
    packed = bytes(q[i] | q[i + 16] << 4 for i in range(16))
    return struct.pack("<ee", d, m) + packed, [d * each + m for each in q]


def _five_bits(q: list[int]) -> bytes:
    fifth = sum((each >> 4) << i for i, each in enumerate(q))
    return struct.pack("<I", fifth) + bytes(q[i] & 15 | (q[i + 16] & 15) << 4 for i in range(16))


def _q5_0(random: np.random.Generator) -> Block:
    d, q = _scale(random), random.integers(0, 32, 32).tolist()
    return struct.pack("<e", d) + _five_bits(q), [d * (each - 16) for each in q]


def _q5_1(random: np.random.Generator) -> Block:
    d, m, q = _scale(random), -_scale(random), random.integers(0, 32, 32).tolist()
    return struct.pack("<ee", d, m) + _five_bits(q), [d * each + m for each in q]


def _q8_0(random: np.random.Generator) -> Block:
    d, q = _scale(random) / 16, random.integers(-128, 128, 32).tolist()
    return struct.pack("<e32b", d, *q), [d * each for each in q]


def _six_bit_scales(scales: list[int], mins: list[int]) -> bytes:
    """Eight of each in 12 bytes: four whole ones, with the upper bits of the later four above them."""
    first = [scales[i] | (scales[i + 4] >> 4) << 6 for i in range(4)]
    second = [mins[i] | (mins[i + 4] >> 4) << 6 for i in range(4)]
    return bytes([*first, *second, *(scales[i + 4] & 15 | (mins[i + 4] & 15) << 4 for i in range(4))])


def _q4_k(random: np.random.Generator) -> Block:
    return _super_block(random, bits=4)


def _q5_k(random: np.random.Generator) -> Block:
    return _super_block(random, bits=5)


def _super_block(random: np.random.Generator, bits: int) -> Block:
    d, dmin = _scale(random) / 16, _scale(random) / 16
    scales, mins = (random.integers(0, 64, 8).tolist() for _ in range(2))
    q = random.integers(0, 2**bits, 256).tolist()
    fifth = bytes(sum((q[32 * group + i] >> 4) << group for group in range(8)) for i in range(32)) if bits == 5 else b""
    low = bytes(q[64 * pair + i] & 15 | (q[64 * pair + 32 + i] & 15) << 4 for pair in range(4) for i in range(32))
    weights = [d * scales[i // 32] * q[i] - dmin * mins[i // 32] for i in range(256)]
    return struct.pack("<ee", d, dmin) + _six_bit_scales(scales, mins) + fifth + low, weights


def _q6_k(random: np.random.Generator) -> Block:
    d, scales = _scale(random) / 256, random.integers(-128, 128, 16).tolist()
    q = random.integers(0, 64, 256).tolist()
    low, high = bytearray(128), bytearray(64)
    for i, each in enumerate(q):
        half, group, place = i // 128, i % 128 // 32, i % 32
        low[64 * half + 32 * (group % 2) + place] |= (each & 15) << (4 * (group // 2))
        high[32 * half + place] |= (each >> 4) << (2 * group)
    weights = [d * scales[i // 16] * (each - 32) for i, each in enumerate(q)]
    return bytes(low) + bytes(high) + struct.pack("<16be", *scales, d), weights


# name -> (the type's number, weights of a block, how one is drawn)
QUANTIZED: dict[str, tuple[int, int, Callable[[np.random.Generator], Block]]] = {
    "Q4_0": (2, 32, _q4_0),
    "Q4_1": (3, 32, _q4_1),
    "Q5_0": (6, 32, _q5_0),
    "Q5_1": (7, 32, _q5_1),
    "Q8_0": (8, 32, _q8_0),
    "Q4_K": (12, 256, _q4_k),
    "Q5_K": (13, 256, _q5_k),
    "Q6_K": (14, 256, _q6_k),
}


def quantized(type_name: str, shape: tuple[int, ...], random: np.random.Generator) -> Stored:
    """Drawn at random, with the weight that it stands for in float32, in which it is exact."""
    kind, block_size, draw = QUANTIZED[type_name]
    blocks = [draw(random) for _ in range(math.prod(shape) // block_size)]
    weight = torch.tensor([each for _, weights in blocks for each in weights], dtype=torch.float64)
    return Stored(kind, b"".join(data for data, _ in blocks), weight.to(torch.float32).view(shape))
