"""Unpacks the block types of GGUF: `weight = scale * value - offset`, in groups of 32 or 16 neighbouring weights. With IQ4_NL,
IQ4_XS and MXFP4 a value is a place in a table of sixteen integers: `weight = scale * table[value]`.

The types of the table below are unpacked here. Of other quantized types the package `gguf` computes the weights. Those of
`GRIDS` are integers times a scale, and are brought back into this form. A type that is in neither table is quantized to 8 bits
with a scale for each 32 weights.

Source: the structs block_q4_0 ... block_iq4_xs of https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h and
`dequantize_row_*` in ggml-quants.c. A row consists of blocks. A block of a type with K or of IQ4_XS (a super-block) has 256
weights, which are 8 groups of 32 weights, or with Q2_K, Q3_K and Q6_K 16 groups of 16 weights. A block of another type has 32
weights. The table shows the parts of a block in the file's order: d, m and dmin are float16 numbers, and a number is a part of
this many bytes. q is the integer that is stored for a weight.

          parts               weight
    Q4_0  d 16                d * (q - 8)             q: unsigned, 4 bits
    Q4_1  d m 16              d * q + m               q: unsigned, 4 bits
    Q5_0  d 4 16              d * (q - 16)            q: unsigned, 5 bits
    Q5_1  d m 4 16            d * q + m               q: unsigned, 5 bits
    Q8_0  d 32                d * q                   q: int8
    Q2_K  16 64 d dmin        d * s * q - dmin * m    q: unsigned, 2 bits
    Q3_K  32 64 12 d          d * (s - 32) * (q - 4)  q: unsigned, 3 bits
    Q4_K  d dmin 12 128       d * s * q - dmin * m    q: unsigned, 4 bits
    Q5_K  d dmin 12 32 128    d * s * q - dmin * m    q: unsigned, 5 bits
    Q6_K  128 64 16 d         d * s * (q - 32)        q: unsigned, 6 bits
    IQ4_NL  d 16              d * t[q]                q: unsigned, 4 bits; t: a table of 16 integers of 8 bits
    IQ4_XS  d 2 4 128         d * (s - 32) * t[q]     the same; s has 6 bits
    MXFP4   e 16              2 ** (e - 128) * t[q]   the same with another table; e is a byte

    16 bytes   (types of 32)  the low 4 bits of q: byte i has weight i in its low half, and weight i + 16 in its high half
    4 bytes    (Q5_0, Q5_1)   bit i of these 32 bits is the fifth bit of q for weight i
    12 bytes   (Q4_K, Q5_K)   s and m of each group, 6 bits each; `_scales_of_super_block` has their places
    128 bytes  (Q4_K, Q5_K)   the low 4 bits of q: 32 bytes for each pair of groups; the first group is in the low halves of the
                              bytes, the second group is in the high halves
    32 bytes   (Q5_K)         bit g of byte i is the fifth bit of q for weight i of group g
    128, 64    (Q6_K)         the low 4 bits and the high 2 bits of q, see `_q6_k`
    16 bytes   (Q6_K)         s: an int8 for each 16 weights
    16, 64     (Q2_K)         s in the low half of a byte, m in the high half; the two bits of q, see `_two_bits`
    32, 12     (Q3_K)         the third bit of q; s of 16 weights, see `_q3_k`
    2, 4, 128  (IQ4_XS)       the two high bits of s, its four low bits, see `_iq4_xs`; 16 bytes of q for each group
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from inflight.config.gguf_types import GgufType, dequantize, lookup_table
from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.model_loader.mxfp4 import mxfp4_weight

_GROUP = 32
_AT_ONCE = 2**22  # number of weights that the package computes at once; as float32 they have 16 MB
_TOLERANCE = 1e-3  # how far a number may be from an integer because of rounding


def unpack_blocks(tensor_type: GgufType, rows: np.ndarray) -> QuantizedWeight | Tensor:
    """uint8 [num_rows, bytes of a row] -> the weight, [num_rows, in_features].

    For F32, F16 and BF16 the result has floats of the stored dtype. For the other types it is a `QuantizedWeight`.
    """
    stored = torch.from_numpy(rows)
    if tensor_type.name in FLOATS:
        return stored.view(FLOATS[tensor_type.name])
    if tensor_type.name in UNPACKERS:
        return UNPACKERS[tensor_type.name](stored.view(len(rows), -1, tensor_type.block_bytes))
    return _quantize(tensor_type, rows)


def _quantize(tensor_type: GgufType, rows: np.ndarray) -> QuantizedWeight:
    """The weights of a type in `GRIDS` are exact. Others change by at most 1/254 of the largest of their group."""
    in_features = rows.shape[1] // tensor_type.block_bytes * tensor_type.block_size
    group_size, largest = GRIDS.get(tensor_type.name, (_GROUP, ()))
    num_groups = in_features // group_size
    values = torch.empty(len(rows), in_features, dtype=torch.uint8, device="cpu")
    scales = torch.empty(len(rows), num_groups, dtype=torch.float32, device="cpu")
    step = max(1, _AT_ONCE // in_features)
    for first in range(0, len(rows), step):
        some = slice(first, first + step)
        groups = torch.from_numpy(dequantize(tensor_type, rows[some])).view(-1, num_groups, group_size)
        scale = _scale_of(groups, largest)
        integers = (groups / torch.where(scale > 0, scale, 1)[..., None]).round_().add_(128)
        values[some] = integers.to(torch.uint8).flatten(1)
        scales[some] = scale
    return _weight(values, scales, scales * 128, 8)


def _scale_of(groups: Tensor, largest: tuple[int, ...]) -> Tensor:
    """float32 [num_rows, num_groups, group_size] -> [num_rows, num_groups]. A scale with which all weights of the group are
    integers, if the largest of them is one of `largest`. Otherwise the largest becomes 127."""
    most = groups.abs().amax(dim=2)
    relative = groups / torch.where(most > 0, most, 1)[..., None]
    scales = most / 127
    for integer in reversed(largest):
        scaled = relative * integer
        is_exact = (scaled - scaled.round()).abs_().amax(dim=2) < _TOLERANCE
        scales = torch.where(is_exact, most / integer, scales)
    return scales


def _halves(blocks: Tensor, start: int, count: int) -> Tensor:
    """Reads `count` float16 numbers of each block, from byte `start` on: float32 [num_rows, num_blocks, count]."""
    return blocks[..., start : start + 2 * count].contiguous().view(torch.float16).float()


def _two_halves(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Reads the two float16 numbers at the beginning of each block: float32 [num_rows, num_blocks, 1] each."""
    both = _halves(blocks, 0, 2)
    return both[..., :1], both[..., 1:]


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> uint8 [..., 2, n]: the low halves of all bytes, then the high halves."""
    values = torch.empty(*packed.shape[:-1], 2, packed.shape[-1], dtype=torch.uint8, device="cpu")
    torch.bitwise_and(packed, 15, out=values[..., 0, :])
    torch.bitwise_right_shift(packed, 4, out=values[..., 1, :])
    return values


def _weight(values: Tensor, scales: Tensor, offsets: Tensor, bits: int) -> QuantizedWeight:
    return QuantizedWeight(
        values=values.flatten(1),
        scales=scales.flatten(1).contiguous(),
        offsets=offsets.flatten(1).contiguous(),
        bits=bits,
    )


def _q4_0(blocks: Tensor) -> QuantizedWeight:
    d = _halves(blocks, 0, 1)
    return _weight(_nibbles(blocks[..., 2:]), d, d * 8, 4)


def _q4_1(blocks: Tensor) -> QuantizedWeight:
    d, m = _two_halves(blocks)
    return _weight(_nibbles(blocks[..., 4:]), d, -m, 4)


def _fifth_bits(packed: Tensor) -> Tensor:
    """uint8 [..., 4] -> uint8 [..., 2, 16]. The value of weight i is 16 if bit i is set, else 0."""
    bits = (packed[..., None] >> torch.arange(8, dtype=torch.uint8, device="cpu")) & 1  # [..., 4, 8]
    return (bits << 4).view(*packed.shape[:-1], 2, 16)


def _q5_0(blocks: Tensor) -> QuantizedWeight:
    d = _halves(blocks, 0, 1)
    return _weight(_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6]), d, d * 16, 8)


def _q5_1(blocks: Tensor) -> QuantizedWeight:
    d, m = _two_halves(blocks)
    return _weight(_nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8]), d, -m, 8)


def _q8_0(blocks: Tensor) -> QuantizedWeight:
    d = _halves(blocks, 0, 1)
    return _weight(blocks[..., 2:] ^ 128, d, d * 128, 8)


def _scales_of_super_block(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The scale d * s and the offset dmin * m of each group of a Q4_K or Q5_K block: float32 [num_rows, num_blocks, 8] each.

    Of the 12 bytes, bytes 0-3 hold s of groups 0-3 in their low 6 bits, and bytes 4-7 hold m of the same groups. Groups 4-7
    have the low 4 bits of s and m in the halves of bytes 8-11 (s in the low halves), and the high 2 bits at the top of bytes
    0-7.
    """
    d, dmin = _two_halves(blocks)
    first = blocks[..., 4:8]
    second = blocks[..., 8:12]
    rest = blocks[..., 12:16]
    scales = torch.cat((first & 63, (rest & 15) | (first >> 6 << 4)), dim=-1)
    mins = torch.cat((second & 63, (rest >> 4) | (second >> 6 << 4)), dim=-1)
    return d * scales, dmin * mins


def _two_bits(packed: Tensor) -> Tensor:
    """uint8 [..., 64] -> uint8 [..., 8, 32]. Each half of the 32 bytes has four groups of 32 weights, byte i has two bits of
    weight i of each group, those of the first group in its lowest bits."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device="cpu")[:, None]
    return ((packed.reshape(*packed.shape[:-1], 2, 1, 32) >> shifts) & 3).flatten(-3, -2)


def _q2_k(blocks: Tensor) -> QuantizedWeight:
    d, dmin = (_halves(blocks, start, 1) for start in (80, 82))
    return _weight(_two_bits(blocks[..., 16:80]), d * (blocks[..., :16] & 15), dmin * (blocks[..., :16] >> 4), 8)


def _q3_k(blocks: Tensor) -> QuantizedWeight:
    """Bit g of byte i of the 32 bytes is the third bit of q of weight i of the 32-weight group g.

    Of the 12 bytes, bytes 0-7 have the low 4 bits of s of groups 0-7 in their low halves, and of groups 8-15 in their high
    halves. Byte 8 + i has the high 2 bits of s of groups i, i + 4, i + 8 and i + 12, those of group i in its lowest bits.
    """
    bits = torch.arange(8, dtype=torch.uint8, device="cpu")[:, None]
    third = (blocks[..., None, :32] >> bits & 1) << 2  # [num_rows, num_blocks, 8, 32]
    packed = blocks[..., 96:108]
    high = (packed[..., None, 8:] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device="cpu")[:, None]) & 3
    scale_values = _nibbles(packed[..., :8]).flatten(-2) | high.flatten(-2) << 4
    scales = _halves(blocks, 108, 1) * (scale_values.to(torch.int8) - 32)
    return _weight(_two_bits(blocks[..., 32:96]) | third, scales, scales * 4, 8)


def _q4_k(blocks: Tensor) -> QuantizedWeight:
    scales, offsets = _scales_of_super_block(blocks)
    packed = blocks[..., 16:].reshape(*blocks.shape[:2], 4, _GROUP)  # 32 bytes hold two groups
    return _weight(_nibbles(packed), scales, offsets, 4)


def _q5_k(blocks: Tensor) -> QuantizedWeight:
    scales, offsets = _scales_of_super_block(blocks)
    groups = torch.arange(8, dtype=torch.uint8, device="cpu")[:, None]
    fifth = (blocks[..., None, 16:48] >> groups & 1) << 4  # [num_rows, num_blocks, 8, 32]
    values = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:2], 4, _GROUP)).view_as(fifth)
    return _weight(values | fifth, scales, offsets, 8)


def _q6_k(blocks: Tensor) -> QuantizedWeight:
    """A block consists of two halves of four parts, each of 32 weights. Each half has 64 of the 128 bytes with the low 4 bits
    of q, and 32 of the 64 bytes with the high 2 bits.

    The 64 bytes hold part 0 in the low halves of bytes 0-31, part 1 in the low halves of bytes 32-63, part 2 in the high halves
    of bytes 0-31, and part 3 in the high halves of bytes 32-63. Byte i of the 32 bytes has the two high bits of weight i of all
    four parts, those of part 0 in its lowest bits.
    """
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64)).view(*blocks.shape[:2], 2, 4, _GROUP)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device="cpu")[:, None]
    high = (blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, _GROUP) >> shifts) & 3
    scales = blocks[..., 192:208].contiguous().view(torch.int8) * _halves(blocks, 208, 1)
    return _weight(low | high << 4, scales, scales * 32, 8)


def _with_table(type_name: str, values: Tensor, scales: Tensor) -> QuantizedWeight:
    """`values`: uint8 in [0, 16), places in the table of the type."""
    table = tuple(lookup_table(type_name).tolist())
    scales = scales.flatten(1).contiguous()
    return QuantizedWeight(values=values.flatten(1), scales=scales, offsets=None, bits=4, table=table)


def _iq4_nl(blocks: Tensor) -> QuantizedWeight:
    d = _halves(blocks, 0, 1)
    return _with_table("IQ4_NL", _nibbles(blocks[..., 2:]), d)


def _iq4_xs(blocks: Tensor) -> QuantizedWeight:
    """Bits 2g and 2g + 1 of the first two bytes are the high bits of s of group g. The halves of the four bytes are the low
    bits of the eight groups, the low half first."""
    groups = torch.arange(8, dtype=torch.int32, device="cpu")
    low = blocks[..., 4:8, None] >> torch.tensor([0, 4], dtype=torch.uint8, device="cpu") & 15
    both_bytes = blocks[..., 2:3].int() | blocks[..., 3:4].int() << 8
    high = both_bytes >> 2 * groups & 3
    scales = _halves(blocks, 0, 1) * ((low.flatten(-2).int() | high << 4) - 32)
    packed = blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16)
    return _with_table("IQ4_NL", _nibbles(packed), scales)


def _mxfp4(blocks: Tensor) -> QuantizedWeight:
    return mxfp4_weight(_nibbles(blocks[..., 1:]).flatten(1), blocks[..., 0])


FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# The types that a `QuantizedWeight` holds exactly: uint8 [num_rows, num_blocks, bytes of a block] -> the weight
UNPACKERS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
# Types whose weights the package computes, and which are integers times a scale in groups of this size. The largest integer of
# a group is one of these. With IQ1 an integer is eight times -1, 0 or 1, plus or minus 1.
GRIDS: dict[str, tuple[int, tuple[int, ...]]] = {
    "IQ1_S": (32, (1, 7, 9)),
    "IQ1_M": (16, (1, 7, 9)),
    "IQ2_XXS": (32, (8, 25, 43)),
    "IQ2_XS": (16, (8, 25, 43)),
    "IQ2_S": (16, (8, 25, 43)),
    "IQ3_XXS": (32, (4, 12, 20, 28, 36, 44, 52, 62)),
    "IQ3_S": (32, (1, 3, 5, 7, 9, 11, 13, 15)),
    "TQ1_0": (32, (1,)),
    "TQ2_0": (32, (1, 2)),
    "NVFP4": (16, (1, 2, 3, 4, 6, 8, 12)),
}
