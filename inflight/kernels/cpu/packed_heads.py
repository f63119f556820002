"""`PackedHeads`: a linear layer with a weight for each head, by the C++ kernels."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from inflight.kernels.cpu.call_checks import require
from inflight.kernels.cpu.functions import DTYPES, LinearWeight
from inflight.kernels.cpu.linear import PackedLinear


class PackedHeads:
    """One packed weight of floats for each head. Several threads may use it at once.

    Args:
        heads: for each head a weight; all have the same shape.
    """

    def __init__(self, kernels: ctypes.CDLL, heads: Sequence[PackedLinear]) -> None:
        shapes = {(head.weight.in_features, head.weight.out_features, head.weight.gate, head.dtype) for head in heads}
        require(len(shapes) == 1 and heads[0].dtype in DTYPES, "heads need weights of one shape, in floats", shapes)
        self._kernels = kernels
        self.heads = heads  # they keep the memory to which the structs point
        self._weights = (LinearWeight * len(heads))(*(head.weight for head in heads))

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """x [num_rows, num_heads, in_features], out [num_rows, num_heads, out_features]: both may have any strides of rows and
        of heads."""
        weight = self._weights[0]
        fits = x.shape[1:] == (len(self._weights), weight.in_features) and out.shape == (
            *x.shape[:2],
            weight.out_features,
        )
        fits = fits and x.stride(2) == out.stride(2) == 1 and x.dtype == out.dtype == self.heads[0].dtype
        require(fits, "a linear layer of heads needs rows of its input features and memory for its results", x, out)
        self._kernels.inflight_linear_of_heads(
            x.data_ptr(),
            *x.stride()[:2],
            out.data_ptr(),
            *out.stride()[:2],
            DTYPES[x.dtype],
            *x.shape[:2],
            self._weights,
        )
