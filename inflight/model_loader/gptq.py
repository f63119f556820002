"""The layouts of GPTQ, as AutoGPTQ and GPTQModel write it, and of AWQ's version "gemm", as AutoAWQ writes it.

GPTQ, 4 or 8 bits; n = 32 / bits:
    qweight  int32 [in_features / n, out_features]   word j of a column holds rows n*j ... n*j + n-1
    qzeros   int32 [num_groups, out_features / n]    words hold neighbouring columns
    scales   float [num_groups, out_features]
    g_idx    int32 [in_features]                     the group of each input feature; not sorted if "act order" (desc_act)

In version 1 ("checkpoint_format": "gptq") zero points are stored minus 1. In version 2 ("gptq_v2") they are stored unchanged.

AWQ, 4 bits; qzeros and scales as above:
    qweight  int32 [in_features, out_features / 8]

A word of qweight and qzeros holds eight neighbouring columns, from its lowest bits up in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.model_loader.packing import ALL, FLOATS, PackedLayout, ReadTensor, check, make_weight, unpack_words
from inflight.model_loader.weight_source import StoredTensor

_REQUIRED = ("qweight", "qzeros", "scales")
_AWQ_BITS = 4
_AWQ_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)  # for each column of a word: its position, from the lowest bits up


class Gptq(PackedLayout):
    """The layout of GPTQ. `stored_zero_offset` is added to the stored zero points."""

    values = ("qweight",)
    required = _REQUIRED
    suffixes = (*_REQUIRED, "g_idx")

    def __init__(self, stored_zero_offset: int) -> None:
        self._stored_zero_offset = stored_zero_offset

    def weight_shape(self, parts: Mapping[str, StoredTensor], read: ReadTensor) -> tuple[int, int]:
        bits = _gptq_bits(parts)
        words, out_features = parts["qweight"].shape
        in_features = words * 32 // bits
        check(parts, "g_idx", ("I32",), (in_features,))
        return _checked_shape(parts, (words, out_features), out_features, in_features, bits)

    def read(
        self, parts: Mapping[str, StoredTensor], shape: tuple[int, int], read: ReadTensor, start: int, stop: int
    ) -> QuantizedWeight | Tensor:
        bits = _gptq_bits(parts)
        scales = _read_scales(read, start, stop)
        values = unpack_words(read("qweight", (ALL, slice(start, stop))).t(), bits)
        zero_points = _read_columns(read, "qzeros", bits, start, stop).t()
        group_index = read("g_idx", (ALL,)) if "g_idx" in parts else None
        return make_weight(values, scales, self._zero_points(zero_points, bits), bits, group_index)

    def _zero_points(self, stored: Tensor, bits: int) -> Tensor:
        # Some writers declare version 1 and store version 2 (https://github.com/vllm-project/vllm/pull/38966). Their weights
        # are symmetric: every zero point is in the middle of the range. So such zero points are taken as they are stored.
        if self._stored_zero_offset == 0 or bool((stored == 2 ** (bits - 1)).all()):
            return stored.to(torch.float32)
        # The zero point 0 is stored as -1 (all bits set), which becomes 2**bits here. The mask makes it 0 again.
        zero_points: Tensor = (stored.int() + self._stored_zero_offset) & (2**bits - 1)
        return zero_points.to(torch.float32)


class Awq(PackedLayout):
    values = ("qweight",)
    required = suffixes = _REQUIRED

    def weight_shape(self, parts: Mapping[str, StoredTensor], read: ReadTensor) -> tuple[int, int]:
        _check_dimensions(parts)
        in_features, words = parts["qweight"].shape
        return _checked_shape(parts, (in_features, words), words * 32 // _AWQ_BITS, in_features, _AWQ_BITS)

    def read(
        self, parts: Mapping[str, StoredTensor], shape: tuple[int, int], read: ReadTensor, start: int, stop: int
    ) -> QuantizedWeight | Tensor:
        values, zero_points = (
            _read_columns(read, suffix, _AWQ_BITS, start, stop, _AWQ_POSITIONS).t() for suffix in ("qweight", "qzeros")
        )
        return make_weight(
            values.contiguous(), _read_scales(read, start, stop), zero_points.to(torch.float32), _AWQ_BITS
        )


def _check_dimensions(parts: Mapping[str, StoredTensor]) -> None:
    if any(len(parts[suffix].shape) != 2 or 0 in parts[suffix].shape for suffix in _REQUIRED):
        raise ValueError("qweight, qzeros and scales should have two dimensions and not be empty")


def _gptq_bits(parts: Mapping[str, StoredTensor]) -> int:
    """Returns how many bits an integer of the weight has: 32 * (columns of qzeros) / (columns of scales)."""
    _check_dimensions(parts)
    bits = 32 * parts["qzeros"].shape[1] / parts["scales"].shape[1]
    if bits not in (4, 8):
        raise ValueError(f"its integers have {bits:g} bits; only 4 and 8 are supported")
    return int(bits)


def _checked_shape(
    parts: Mapping[str, StoredTensor], packed: tuple[int, int], out_features: int, in_features: int, bits: int
) -> tuple[int, int]:
    """Returns (out_features, in_features), after a check that the other tensors fit `packed`, the shape of qweight."""
    num_groups = parts["scales"].shape[0]
    check(parts, "qweight", ("I32",), packed)
    check(parts, "qzeros", ("I32",), (num_groups, out_features * bits // 32))
    check(parts, "scales", FLOATS, (num_groups, out_features))
    if "g_idx" not in parts and in_features % num_groups:
        raise ValueError(
            f"{in_features} input features cannot be divided into {num_groups} equal groups, and there is no g_idx"
        )
    return out_features, in_features


def _read_scales(read: ReadTensor, start: int, stop: int) -> Tensor:
    """Returns the scales of output features `[start, stop)`: float32 [stop - start, num_groups]."""
    return read("scales", (ALL, slice(start, stop))).t().to(torch.float32).contiguous()


def _read_columns(
    read: ReadTensor, suffix: str, bits: int, start: int, stop: int, positions: tuple[int, ...] | None = None
) -> Tensor:
    """Reads columns `[start, stop)` of an int32 tensor whose words hold neighbouring columns: uint8 [rows, stop - start].

    `positions`: for each column of a word, its position in the word, counted from the lowest bits. None if the columns are in
    order.
    """
    per_word = 32 // bits
    first = start // per_word
    words = read(suffix, (ALL, slice(first, -(-stop // per_word))))
    columns = unpack_words(words, bits)
    if positions is not None:
        columns = columns.view(len(words), -1, per_word)[..., list(positions)].flatten(1)
    return columns[:, start - first * per_word : stop - first * per_word]
