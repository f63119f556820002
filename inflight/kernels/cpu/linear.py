"""Linear layers by the C++ kernels. A weight is packed (copied into the kernels' layout) once and then used for any input."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from inflight.device.host_memory import advise_huge_pages
from inflight.kernels.cpu.library import DTYPES, LinearWeight
from inflight.kernels.gate import GATE_CODES
from inflight.kernels.quantized_weight import QuantizedWeight

IN_FEATURES_MULTIPLE = 4  # one instruction multiplies four bytes
MAX_INTEGER_IN_FEATURES = 2**31 // (255 * 127)  # the sum of so many products of a uint8 and an int8 fits an int32


_HUGE_PAGE = 2 << 20
_CHUNK = 256 << 20
_LINE = 64


class HugePages:
    """Allocates memory for packed weights in large mappings of huge pages. A mapping exists until the last tensor in it is
    deleted."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def allocate(self, num_bytes: int) -> Tensor:
        """Returns a zeroed tensor, uint8 [num_bytes], aligned to 64 bytes. Pages that are never written take no memory."""
        start = -(-self._used // _LINE) * _LINE
        if start + num_bytes > len(self._chunk):
            self._chunk, start = _map(max(num_bytes, _CHUNK)), 0
        self._used = start + num_bytes
        return self._chunk[start : self._used]


def _map(num_bytes: int) -> Tensor:
    pages = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise_huge_pages(pages)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _HUGE_PAGE :]


class PackedLinear:
    """One packed weight, with its bias. Several threads may use it at once.

    Args:
        weight: describes the weight. Its pointers are not set yet; the constructor sets them.
        memory: allocates the memory of the packed weight.
        bias: [out_features] or None.
        parts: stacked along the rows, they are [out_features, in_features]. Each part may have its own row stride.
        scales, offsets: float32, as in `QuantizedWeight`.
    """

    def __init__(
        self,
        kernels: ctypes.CDLL,
        weight: LinearWeight,
        memory: HugePages,
        bias: Tensor | None,
        parts: Sequence[Tensor],
        scales: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        self._kernels, self.weight = kernels, weight
        num_bytes, num_lanes = ctypes.c_int64(), ctypes.c_int64()
        kernels.inflight_packed_size(weight, num_bytes, num_lanes)
        self.packed = memory.allocate(num_bytes.value)
        weight.packed = self.packed.data_ptr()
        self._bias: Tensor | None = None
        if bias is not None:
            features = torch.empty(num_lanes.value, dtype=torch.int64)
            kernels.inflight_packed_features(weight, features.data_ptr())
            self._bias = bias.float()[features.clamp(min=0)].contiguous()
            weight.bias = self._bias.data_ptr()
        self.num_columns = weight.out_features // 2 if weight.gate else weight.out_features
        assert sum(len(part) for part in parts) == weight.out_features
        assert all(part.stride(1) == 1 and part.shape[1] == weight.in_features for part in parts)
        assert all(tensor is None or tensor.is_contiguous() for tensor in (scales, offsets))
        rows = torch.cat([part.data_ptr() + torch.arange(len(part)) * part.stride(0) * part.itemsize for part in parts])
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in (scales, offsets))
        kernels.inflight_pack_linear(rows.data_ptr(), parts[0].dtype == torch.int8, *pointers, weight)

    def __call__(self, x: Tensor, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """x [num_rows, in_features] -> [num_rows, num_columns], written to `out` if it is given. If the weight has floats, x
        must have the weight's dtype."""
        num_rows = x.shape[0]
        assert x.stride(1) == 1 and x.shape[1] == self.weight.in_features
        if out is None:
            out = torch.empty((num_rows, self.num_columns), dtype=out_dtype)
        assert out.is_contiguous() and out.shape == (num_rows, self.num_columns) and out.dtype == out_dtype
        self._kernels.inflight_linear(
            x.data_ptr(),
            x.stride(0),
            DTYPES[x.dtype],
            out.data_ptr(),
            self.num_columns,
            DTYPES[out_dtype],
            num_rows,
            self.weight,
        )
        return out


class PackedHeads:
    """One packed weight of floats for each head. Several threads may use it at once.

    Args:
        heads: for each head a weight; all have the same shape.
    """

    def __init__(self, kernels: ctypes.CDLL, heads: Sequence[PackedLinear]) -> None:
        self._kernels, self._heads = kernels, heads  # they keep the memory to which the structs point
        self._weights = (LinearWeight * len(heads))(*(head.weight for head in heads))

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """x [num_rows, num_heads, in_features], out [num_rows, num_heads, out_features]: both may have any strides of rows and
        of heads."""
        weight = self._weights[0]
        assert x.shape[1:] == (len(self._weights), weight.in_features) and x.stride(2) == out.stride(2) == 1
        assert out.shape == (*x.shape[:2], weight.out_features) and x.dtype == out.dtype
        self._kernels.inflight_linear_of_heads(
            x.data_ptr(),
            *x.stride()[:2],
            out.data_ptr(),
            *out.stride()[:2],
            DTYPES[x.dtype],
            *x.shape[:2],
            self._weights,
        )


def pack_float(
    kernels: ctypes.CDLL, memory: HugePages, parts: Sequence[Tensor], bias: Tensor | None, *, gate: str | None
) -> PackedLinear:
    """Packs a weight of floats. `parts`: see `PackedLinear`; all are float32 or all are bfloat16. `gate`: if it is
    given, the result is gate(first half of the output features) * second half."""
    in_features = parts[0].shape[1]
    described = LinearWeight(
        in_features=in_features,
        out_features=sum(len(part) for part in parts),
        group_size=in_features,
        scale=1.0,
        bits=8 * parts[0].itemsize,
        gate=GATE_CODES[gate],
    )
    return PackedLinear(kernels, described, memory, bias, parts)


def pack_integers(
    kernels: ctypes.CDLL, memory: HugePages, weight: QuantizedWeight, bias: Tensor | None, *, gate: str | None
) -> PackedLinear:
    """Packs integers. The kernels store the scales and offsets of groups in float16. To fit, they are divided by a power of
    two."""
    out_features, in_features = weight.shape
    scales, offsets = weight.scales, weight.offsets
    if offsets is not None and torch.equal(offsets, scales * 2 ** (weight.bits - 1)):
        offsets = None  # without offsets, the kernel itself computes with scales * 2 ** (bits - 1)
    largest = max(float(tensor.abs().max()) for tensor in (scales, offsets) if tensor is not None and tensor.numel())
    exponent = math.frexp(largest)[1] if math.isfinite(largest) else 0
    described = LinearWeight(
        in_features=in_features,
        out_features=out_features,
        group_size=weight.group_size,
        scale=2.0**exponent,
        bits=weight.bits,
        has_offsets=offsets is not None,
        gate=GATE_CODES[gate],
    )
    scaled = [None if tensor is None else (tensor * 2.0**-exponent).contiguous() for tensor in (scales, offsets)]
    return PackedLinear(kernels, described, memory, bias, [weight.values], *scaled)


def quantize_rows(kernels: ctypes.CDLL, parts: Sequence[Tensor], *, bits: int, group_size: int) -> QuantizedWeight:
    """Quantizes a weight. `parts`, stacked along the rows, are [out_features, in_features].

    The method is that of `quantize_rows` in kernels/quantized_weight.py. 8 bits: one scale per row, symmetric. 4 bits: one
    scale and one offset per group of `group_size` weights in a row.
    """
    out_features, in_features = sum(len(part) for part in parts), parts[0].shape[1]
    group_size = in_features if bits == 8 else group_size
    shape = out_features, in_features // group_size
    values = torch.empty(out_features, in_features, dtype=torch.int8 if bits == 8 else torch.uint8)
    scales = torch.empty(shape)
    offsets = None if bits == 8 else torch.empty(shape)
    first = 0
    for part in parts:
        held = slice(first, first + len(part))
        kernels.inflight_quantize_weight(
            part.data_ptr(),
            part.stride(0),
            DTYPES[part.dtype],
            len(part),
            in_features,
            group_size,
            bits,
            values[held].data_ptr(),
            scales[held].data_ptr(),
            None if offsets is None else offsets[held].data_ptr(),
        )
        first = held.stop
    return QuantizedWeight(values=values, scales=scales, offsets=offsets, bits=bits)
