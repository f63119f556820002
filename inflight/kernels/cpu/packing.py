"""Packs weights for the C++ kernels of linear layers: floats, and integers of any source; and quantizes floats."""

import ctypes
import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from inflight.kernels.cpu.call_checks import require
from inflight.kernels.cpu.functions import DTYPES, LinearWeight
from inflight.kernels.cpu.huge_pages import HugePages
from inflight.kernels.cpu.limits import linear_problem, require_supported
from inflight.kernels.cpu.linear import PackedLinear
from inflight.kernels.gate import GATE_CODES, MLP_GATES
from inflight.kernels.quantized_weight import QuantizedWeight

_PART_DTYPES = {32: (torch.float32,), 16: (torch.bfloat16,), 8: (torch.int8, torch.uint8), 4: (torch.uint8,)}  # of bits


def pack_float(
    kernels: ctypes.CDLL, memory: HugePages, parts: Sequence[Tensor], bias: Tensor | None, *, gate: str | None
) -> PackedLinear:
    """Packs a weight of floats. `parts`: see `pack`; all are float32 or all are bfloat16. `gate`: if it is
    given, the result is gate(first half of the output features) * second half."""
    described = describe_floats(parts[0], gate=gate)
    described.out_features = sum(len(part) for part in parts)
    return pack(kernels, described, memory, bias, parts)


def pack_integers(
    kernels: ctypes.CDLL, memory: HugePages, weight: QuantizedWeight, bias: Tensor | None, *, gate: str | None
) -> PackedLinear:
    """Packs integers. The kernels store the scales and offsets of groups in float16. To fit, they are divided by a power of
    two."""
    values, offsets = with_zero_in_the_middle(weight)
    scale = common_scale([tensor for tensor in (weight.scales, offsets) if tensor is not None])
    described = describe_integers(weight, has_offsets=offsets is not None, scale=scale, gate=gate)
    return pack(kernels, described, memory, bias, [values], scaled(weight.scales, scale), scaled(offsets, scale))


def describe_floats(part: Tensor, *, gate: str | None) -> LinearWeight:
    """Describes a weight whose rows are those of `part`."""
    in_features = part.shape[1]
    return LinearWeight(
        in_features=in_features,
        out_features=len(part),
        group_size=in_features,
        scale=1.0,
        bits=8 * part.itemsize,
        gate=GATE_CODES[gate],
    )


def describe_integers(weight: QuantizedWeight, *, has_offsets: bool, scale: float, gate: str | None) -> LinearWeight:
    """`scale`: what the stored scales and offsets are divided by."""
    out_features, in_features = weight.shape
    return LinearWeight(
        in_features=in_features,
        out_features=out_features,
        group_size=weight.group_size,
        scale=scale,
        bits=weight.bits,
        has_offsets=has_offsets,
        gate=GATE_CODES[gate],
        has_table=bool(weight.table),
        table=(ctypes.c_int8 * 16)(*weight.table),
    )


def common_scale(tensors: Sequence[Tensor]) -> float:
    """A power of two above all these scales and offsets."""
    largest = max(float(tensor.abs().max()) for tensor in tensors if tensor.numel())
    return 2.0 ** (math.frexp(largest)[1] if math.isfinite(largest) else 0)


def scaled(tensor: Tensor | None, scale: float) -> Tensor | None:
    return None if tensor is None else (tensor * (1 / scale)).contiguous()


def packed_bytes(kernels: ctypes.CDLL, weight: LinearWeight) -> int:
    num_bytes, num_lanes = ctypes.c_int64(), ctypes.c_int64()
    kernels.inflight_packed_size(weight, num_bytes, num_lanes)
    return num_bytes.value


def pack_bias(kernels: ctypes.CDLL, weight: LinearWeight, bias: Tensor | None) -> Tensor | None:
    """The bias in the order of the packed weight, whose pointer to it is set."""
    if bias is None:
        return None
    num_bytes, num_lanes = ctypes.c_int64(), ctypes.c_int64()
    kernels.inflight_packed_size(weight, num_bytes, num_lanes)
    features = torch.empty(num_lanes.value, dtype=torch.int64, device="cpu")
    kernels.inflight_packed_features(weight, features.data_ptr())
    packed: Tensor = bias.float()[features.clamp(min=0)].contiguous()
    weight.bias = packed.data_ptr()
    return packed


class Memory(Protocol):
    """What has memory for packed weights."""

    def allocate(self, num_bytes: int) -> Tensor: ...


def pack(
    kernels: ctypes.CDLL,
    weight: LinearWeight,
    memory: Memory,
    bias: Tensor | None,
    parts: Sequence[Tensor],
    scales: Tensor | None = None,
    offsets: Tensor | None = None,
) -> PackedLinear:
    """Packs a weight.

    Args:
        weight: describes the weight. Its pointers are not set yet; this function sets them.
        memory: allocates the memory of the packed weight.
        bias: [out_features] or None.
        parts: stacked along the rows, they are [out_features, in_features]. Each part may have its own row stride.
        scales, offsets: float32, as in `QuantizedWeight`.

    Raises:
        ConfigError: the kernels do not support the weight.
    """
    _check_weight(weight, bias, parts, scales, offsets)
    packed = memory.allocate(packed_bytes(kernels, weight))
    weight.packed = packed.data_ptr()
    packed_bias = pack_bias(kernels, weight, bias)
    rows = torch.cat([_row_pointers(part) for part in parts])
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in (scales, offsets))
    kernels.inflight_pack_linear(rows.data_ptr(), parts[0].dtype == torch.int8, *pointers, weight)
    return PackedLinear(kernels, weight, parts[0].dtype, packed, packed_bias)


def _check_weight(
    weight: LinearWeight, bias: Tensor | None, parts: Sequence[Tensor], scales: Tensor | None, offsets: Tensor | None
) -> None:
    """Checks that the kernels support the weight, and that its tensors have the sizes that it describes."""
    require_supported(linear_problem(weight.in_features, group_size=weight.group_size, bits=weight.bits))
    dtype = parts[0].dtype
    fits = sum(len(part) for part in parts) == weight.out_features and dtype in _PART_DTYPES[weight.bits]
    fits = fits and all(
        part.stride(1) == 1 and part.shape[1] == weight.in_features and part.dtype == dtype for part in parts
    )
    needed = f"a weight of {weight.bits} bits, {weight.out_features} x {weight.in_features}, needs parts of these sizes"
    require(fits, needed, *parts)
    groups = weight.out_features, weight.in_features // weight.group_size
    for tensor, is_needed in ((scales, weight.bits <= 8), (offsets, bool(weight.has_offsets))):
        fits = not is_needed if tensor is None else tensor.shape == groups and tensor.dtype == torch.float32
        fits = fits and (tensor is None or tensor.is_contiguous())
        require(fits, f"integer weights need scales or offsets in float32 {list(groups)}", tensor)
    is_even = weight.out_features % 2 == 0
    fits = weight.gate == 0 or (weight.gate in map(GATE_CODES.get, MLP_GATES) and is_even)
    needed = f"a gate is one of {', '.join(MLP_GATES)}, and needs an even number of features"
    require(fits, needed, weight.gate, weight.out_features)
    require(bias is None or bias.shape == (weight.out_features,), "a bias needs a number for each feature", bias)


def _row_pointers(part: Tensor) -> Tensor:
    index = torch.arange(len(part), dtype=torch.int64, device="cpu")
    return part.data_ptr() + index * part.stride(0) * part.itemsize


def with_zero_in_the_middle(weight: QuantizedWeight) -> tuple[Tensor, Tensor | None]:
    """Returns values and offsets. The kernel needs no offsets if the zero point of all groups is 2 ** (bits - 1). If all groups
    share another zero point, all values are shifted so that the zero point becomes 2 ** (bits - 1), unless a shifted value
    would be outside of [0, 2 ** bits)."""
    values, scales, offsets = weight.values, weight.scales, weight.offsets
    if offsets is None:
        return values, None
    at = int(scales.abs().argmax())
    ratio = float(offsets.flatten()[at]) / (float(scales.flatten()[at]) or 1.0)
    zero_point = round(ratio) if abs(ratio) < 2**weight.bits else 0
    if not torch.equal(offsets, scales * zero_point):
        return values, offsets
    shift = 2 ** (weight.bits - 1) - zero_point
    lowest, highest = (int(each) for each in values.aminmax())
    if shift == 0 or lowest + shift < 0 or highest + shift >= 2**weight.bits:
        return values, None if shift == 0 else offsets
    return values + shift % 256, None


def quantize_rows(kernels: ctypes.CDLL, parts: Sequence[Tensor], *, bits: int, group_size: int) -> QuantizedWeight:
    """Quantizes a weight. `parts`, stacked along the rows, are [out_features, in_features].

    The method is that of `quantize_rows` in kernels/quantized_weight.py. 8 bits: one scale per row, symmetric. 4 bits: one
    scale and one offset per group of `group_size` weights in a row.
    """
    out_features = sum(len(part) for part in parts)
    in_features = parts[0].shape[1]
    group_size = in_features if bits == 8 else group_size
    require_supported(linear_problem(in_features, group_size=group_size, bits=bits))
    for part in parts:
        fits = bits <= 8 and part.stride(1) == 1 and part.shape[1] == in_features and part.dtype in DTYPES
        require(fits, "quantize_rows needs 8 or 4 bits, and parts of one width in float32 or bfloat16", bits, part)
    shape = out_features, in_features // group_size
    values = torch.empty(out_features, in_features, dtype=torch.int8 if bits == 8 else torch.uint8, device="cpu")
    scales = torch.empty(shape, dtype=torch.float32, device="cpu")
    offsets = None if bits == 8 else torch.empty(shape, dtype=torch.float32, device="cpu")
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
