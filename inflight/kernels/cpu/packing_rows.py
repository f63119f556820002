"""`pack_rows`: packs a weight for the C++ kernels some rows at a time, so that it is never in memory twice.

The packed weight has the bytes that `pack_float` and `pack_integers` make of the whole weight. There is one exception: if all
groups of some rows have one zero point, but not the same as those of other rows, no offsets are stored. The numbers are equal.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from inflight.kernels.cpu.functions import LinearWeight
from inflight.kernels.cpu.huge_pages import HugePages
from inflight.kernels.cpu.linear import PackedLinear
from inflight.kernels.cpu.packing import (
    common_scale,
    describe_floats,
    describe_integers,
    pack,
    pack_bias,
    packed_bytes,
    scaled,
    with_zero_in_the_middle,
)
from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.kernels.weight_rows import WeightRows, join

Quantize = Callable[[Sequence[Tensor]], QuantizedWeight]


class _NeedsOffsetsError(Exception):
    """The first rows need no offsets, but others do."""


class _Region:
    """Gives away the memory of a packed weight from front to back: its panels follow each other without gaps."""

    def __init__(self, memory: Tensor) -> None:
        self._rest = memory

    def allocate(self, num_bytes: int) -> Tensor:
        part = self._rest[:num_bytes]
        self._rest = self._rest[num_bytes:]
        return part


def pack_rows(
    kernels: ctypes.CDLL,
    memory: HugePages,
    weight: WeightRows,
    bias: Tensor | None,
    *,
    gate: str | None,
    quantize: Quantize | None,
) -> PackedLinear:
    """
    Args:
        gate: as of `pack_float`.
        quantize: makes integers of rows of floats; None: floats stay floats.
    """
    packer = _RowPacker(kernels, weight, gate, quantize)
    try:
        return packer.pack(memory, bias, may_drop_offsets=True)
    except _NeedsOffsetsError:
        return packer.pack(memory, bias, may_drop_offsets=False)


class _Scales(NamedTuple):
    """Of some rows of integers, as they were read."""

    described: LinearWeight
    scales: Tensor
    offsets: Tensor | None


class _RowPacker:
    def __init__(self, kernels: ctypes.CDLL, weight: WeightRows, gate: str | None, quantize: Quantize | None) -> None:
        self._kernels = kernels
        self._weight = weight
        self._gate = gate
        self._quantize = quantize

    def pack(self, memory: HugePages, bias: Tensor | None, *, may_drop_offsets: bool) -> PackedLinear:
        out_features = self._weight.shape[0]
        num_columns = out_features // 2 if self._gate else out_features
        step = self._weight.step
        whole: LinearWeight | None = None
        of_integers: list[_Scales] = []
        for start in range(0, num_columns, step):
            part = self._read(start, min(start + step, num_columns))
            values, offsets = _integers(part, may_drop_offsets)
            if whole is None:
                whole = self._describe(part, has_offsets=offsets is not None)
                whole.out_features = out_features
                dtype = values.dtype
                packed = memory.allocate(packed_bytes(self._kernels, whole))
                region = _Region(packed)
            elif offsets is not None and not whole.has_offsets:
                raise _NeedsOffsetsError
            elif whole.has_offsets:
                values, offsets = _integers(part, may_drop_offsets=False)
            described = self._describe(part, has_offsets=offsets is not None)
            if isinstance(part, QuantizedWeight):
                pack(self._kernels, described, region, None, [values], part.scales, offsets)
                of_integers.append(_Scales(described, part.scales, offsets))
            else:
                pack(self._kernels, described, region, None, [values])
            del part, values
        assert whole is not None, "a weight has rows"
        if of_integers:
            self._store_scales(whole, of_integers)
        whole.packed = packed.data_ptr()
        packed_bias = pack_bias(self._kernels, whole, bias)
        return PackedLinear(self._kernels, whole, dtype, packed, packed_bias)

    def _read(self, start: int, stop: int) -> Tensor | QuantizedWeight:
        """The rows of some columns of the result; with a gate, first those of the gate."""
        part = self._weight.read(start, stop)
        if self._gate is not None:
            half = self._weight.shape[0] // 2
            part = join([part, self._weight.read(half + start, half + stop)])
        if self._quantize is None or isinstance(part, QuantizedWeight):
            return part
        return self._quantize([part])

    def _describe(self, part: Tensor | QuantizedWeight, *, has_offsets: bool) -> LinearWeight:
        if isinstance(part, Tensor):
            return describe_floats(part, gate=self._gate)
        return describe_integers(part, has_offsets=has_offsets, scale=1.0, gate=self._gate)

    def _store_scales(self, whole: LinearWeight, of_integers: list[_Scales]) -> None:
        """Only when all rows have been read, it is known what all scales are divided by."""
        found = [tensor for each in of_integers for tensor in (each.scales, each.offsets) if tensor is not None]
        whole.scale = common_scale(found)
        for described, scales, offsets in of_integers:
            divided = scaled(scales, whole.scale)
            divided_offsets = scaled(offsets, whole.scale)
            assert divided is not None
            self._kernels.inflight_pack_linear(
                None,
                False,
                divided.data_ptr(),
                None if divided_offsets is None else divided_offsets.data_ptr(),
                described,
            )


def _integers(part: Tensor | QuantizedWeight, may_drop_offsets: bool) -> tuple[Tensor, Tensor | None]:
    """The values and offsets to pack; floats are their own values."""
    if isinstance(part, Tensor):
        return part, None
    return with_zero_in_the_middle(part) if may_drop_offsets else (part.values, part.offsets)
