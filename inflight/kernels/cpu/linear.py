"""Linear layers by the C++ kernels. A weight is packed (copied into the kernels' layout) once, by packing.py, and then used for
any input.
"""

import ctypes
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from inflight.config.architecture import GELU_TANH, SILU
from inflight.device.host_memory import advise_huge_pages
from inflight.kernels.cpu.functions import DTYPES, LinearWeight
from inflight.kernels.cpu.limits import linear_problem, require, require_supported
from inflight.kernels.gate import GATE_CODES

_PART_DTYPES = {32: (torch.float32,), 16: (torch.bfloat16,), 8: (torch.int8, torch.uint8), 4: (torch.uint8,)}  # of bits

_HUGE_PAGE = 2 << 20
_CHUNK = 256 << 20
_LINE = 64


class HugePages:
    """Allocates memory for packed weights in large mappings of huge pages. A mapping exists until the last tensor in it is
    deleted."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8, device="cpu")
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

    Raises:
        ConfigError: the kernels do not support the weight.
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
        require_supported(linear_problem(weight.in_features, group_size=weight.group_size, bits=weight.bits))
        self.dtype = parts[0].dtype  # of the weight
        fits = sum(len(part) for part in parts) == weight.out_features and self.dtype in _PART_DTYPES[weight.bits]
        fits = fits and all(
            part.stride(1) == 1 and part.shape[1] == weight.in_features and part.dtype == self.dtype for part in parts
        )
        needed = (
            f"a weight of {weight.bits} bits, {weight.out_features} x {weight.in_features}, needs parts of these sizes"
        )
        require(fits, needed, *parts)
        groups = weight.out_features, weight.in_features // weight.group_size
        for tensor, is_needed in ((scales, weight.bits <= 8), (offsets, bool(weight.has_offsets))):
            fits = not is_needed if tensor is None else tensor.shape == groups and tensor.dtype == torch.float32
            fits = fits and (tensor is None or tensor.is_contiguous())
            require(fits, f"integer weights need scales or offsets in float32 {list(groups)}", tensor)
        fits = weight.gate in (0, GATE_CODES[SILU], GATE_CODES[GELU_TANH]) and not (
            weight.gate and weight.out_features % 2
        )
        require(fits, "a gate needs SiLU or GELU, and an even number of features", weight.gate, weight.out_features)
        require(bias is None or bias.shape == (weight.out_features,), "a bias needs a number for each feature", bias)
        self._kernels, self.weight = kernels, weight
        num_bytes, num_lanes = ctypes.c_int64(), ctypes.c_int64()
        kernels.inflight_packed_size(weight, num_bytes, num_lanes)
        self.packed = memory.allocate(num_bytes.value)
        weight.packed = self.packed.data_ptr()
        self._bias: Tensor | None = None
        if bias is not None:
            features = torch.empty(num_lanes.value, dtype=torch.int64, device="cpu")
            kernels.inflight_packed_features(weight, features.data_ptr())
            self._bias = bias.float()[features.clamp(min=0)].contiguous()
            weight.bias = self._bias.data_ptr()
        self.num_columns = weight.out_features // 2 if weight.gate else weight.out_features
        rows = torch.cat([_row_pointers(part) for part in parts])
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in (scales, offsets))
        kernels.inflight_pack_linear(rows.data_ptr(), parts[0].dtype == torch.int8, *pointers, weight)

    def __call__(self, x: Tensor, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """x [num_rows, in_features] -> [num_rows, num_columns], written to `out` if it is given. If the weight has floats, x
        must have the weight's dtype."""
        num_rows = x.shape[0]
        fits = x.stride(1) == 1 and x.shape == (num_rows, self.weight.in_features)
        fits = fits and (x.dtype == self.dtype if self.dtype.is_floating_point else x.dtype in DTYPES)
        require(fits, "a linear layer needs rows of its input features, in the weight's dtype if this is floats", x)
        if out is None:
            out = torch.empty((num_rows, self.num_columns), dtype=out_dtype, device="cpu")
        fits = out.is_contiguous() and out.shape == (num_rows, self.num_columns) and out.dtype == out_dtype
        require(
            fits and out_dtype in DTYPES, "a linear layer needs memory for its results, in float32 or bfloat16", out
        )
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


def _row_pointers(part: Tensor) -> Tensor:
    index = torch.arange(len(part), dtype=torch.int64, device="cpu")
    return part.data_ptr() + index * part.stride(0) * part.itemsize
