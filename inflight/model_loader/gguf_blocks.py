"""Unpacks the block types of GGUF: `weight = scale * value - offset`, in groups of 32 or 16 neighbouring weights.

Source: the structs block_q4_0 ... block_q6_K of https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h and
`dequantize_row_*` in ggml-quants.c. A row consists of blocks. A block of Q4_0 to Q8_0 has 32 weights. A block of Q4_K to Q6_K
(a super-block) has 256 weights, which are 8 groups of 32 weights, or with Q6_K 16 groups of 16 weights. The table shows the
parts of a block in the file's order: d, m and dmin are float16 numbers, and a number is a part of this many bytes. q is the
integer that is stored for a weight.

          parts               weight
    Q4_0  d 16                d * (q - 8)             q: unsigned, 4 bits
    Q4_1  d m 16              d * q + m               q: unsigned, 4 bits
    Q5_0  d 4 16              d * (q - 16)            q: unsigned, 5 bits
    Q5_1  d m 4 16            d * q + m               q: unsigned, 5 bits
    Q8_0  d 32                d * q                   q: int8
    Q4_K  d dmin 12 128       d * s * q - dmin * m    q: unsigned, 4 bits
    Q5_K  d dmin 12 32 128    d * s * q - dmin * m    q: unsigned, 5 bits
    Q6_K  128 64 16 d         d * s * (q - 32)        q: unsigned, 6 bits

    16 bytes   (Q4, Q5)       the low 4 bits of q: byte i has weight i in its low half, and weight i + 16 in its high half
    4 bytes    (Q5_0, Q5_1)   bit i of these 32 bits is the fifth bit of q for weight i
    12 bytes   (Q4_K, Q5_K)   s and m of each group, 6 bits each; `_scales_of_super_block` has their places
    128 bytes  (Q4_K, Q5_K)   the low 4 bits of q: 32 bytes for each pair of groups; the first group is in the low halves of the
                              bytes, the second group is in the high halves
    32 bytes   (Q5_K)         bit g of byte i is the fifth bit of q for weight i of group g
    128, 64    (Q6_K)         the low 4 bits and the high 2 bits of q, see `_q6_k`
    16 bytes   (Q6_K)         s: an int8 for each 16 weights
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from inflight.kernels.quantized_weight import QuantizedWeight

_GROUP = 32


def unpack_blocks(type_name: str, rows: Tensor) -> QuantizedWeight | Tensor:
    """uint8 [num_rows, bytes of a row] -> the weight, [num_rows, in_features].

    For F32, F16 and BF16 the result has floats of the stored dtype. For the other types it is a `QuantizedWeight`.
    """
    if type_name in _FLOATS:
        return rows.view(_FLOATS[type_name])
    block_bytes, unpack = _BLOCKS[type_name]
    return unpack(rows.view(len(rows), -1, block_bytes))


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
    first, second, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (rest & 15) | (first >> 6 << 4)), dim=-1)
    mins = torch.cat((second & 63, (rest >> 4) | (second >> 6 << 4)), dim=-1)
    return d * scales, dmin * mins


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


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCKS: Mapping[str, tuple[int, Callable[[Tensor], QuantizedWeight]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
