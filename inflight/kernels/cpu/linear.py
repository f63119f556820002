"""`PackedLinear`: a linear layer by the C++ kernels, for any input. packing.py makes it from a weight."""

import ctypes

import torch
from torch import Tensor

from inflight.kernels.cpu.call_checks import require
from inflight.kernels.cpu.functions import DTYPES, LinearWeight


class PackedLinear:
    """One packed weight, with its bias. Several threads may use it at once.

    Args:
        weight: describes the weight. Its pointers point into `packed` and `bias`.
        dtype: of the weight before it was packed.
        packed: uint8, the weight in the kernels' layout.
        bias: float32 in the order of that layout, or None.
    """

    def __init__(
        self, kernels: ctypes.CDLL, weight: LinearWeight, dtype: torch.dtype, packed: Tensor, bias: Tensor | None
    ) -> None:
        self.weight, self.dtype, self.packed = weight, dtype, packed
        self.num_columns = weight.out_features // 2 if weight.gate else weight.out_features
        self.bias = bias
        self._kernels = kernels

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
