"""The gated delta rule by the C++ kernel (gated_delta.cpp). kernels/gated_delta.py has the formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.kernels.cpu.library import DTYPES, AttentionStep, GatedDelta, KernelLibrary
from inflight.kernels.gated_delta import GatedDeltaShape, GatedDeltaWeights

_KEY_MULTIPLE, _VALUE_MULTIPLE, _MAX_KERNEL_SIZE = 16, 32, 8  # of gated_delta.cpp


class CpuGatedDelta:
    """Keeps the weights, to which the kernel has pointers."""

    def __init__(self, kernels: KernelLibrary, shape: GatedDeltaShape, weights: GatedDeltaWeights) -> None:
        self._kernels, self._shape, self._weights = kernels, shape, weights

    @staticmethod
    def supports(shape: GatedDeltaShape, dtype: torch.dtype) -> bool:
        fits = shape.key_dim % _KEY_MULTIPLE == 0 and shape.value_dim % _VALUE_MULTIPLE == 0
        return fits and shape.kernel_size <= _MAX_KERNEL_SIZE and dtype in DTYPES

    def __call__(self, rows: Tensor, states: Tensor, offsets: list[int], step: AttentionStep) -> Tensor:
        """Computes a step, and keeps the states in their blocks.

        Args:
            rows: [num_tokens, width], as in `GatedDeltaShape.row_parts`.
            states: uint8 [num_blocks, bytes]: the matrices, and the inputs of the convolution.
            offsets: where the matrices begin in a block, and where the inputs begin.
            step: which rows belong to which sequence, and their block tables.

        Returns:
            [num_tokens, num_value_heads * value_dim]
        """
        shape, weights = self._shape, self._weights
        assert rows.stride(1) == 1 and rows.shape[1] == sum(shape.row_parts), (rows.shape, shape)
        layer = GatedDelta(
            shape.num_key_heads,
            shape.num_value_heads,
            shape.key_dim,
            shape.value_dim,
            shape.kernel_size,
            states.stride(0),
            offsets[1],
            weights.conv.data_ptr(),
            weights.rates.data_ptr(),
            weights.step_bias.data_ptr(),
            weights.norm.data_ptr(),
            weights.eps,
            DTYPES[rows.dtype],
        )
        out = torch.empty((len(rows), shape.num_value_heads * shape.value_dim), dtype=rows.dtype)
        self._kernels.inflight_gated_delta(
            rows.data_ptr(), rows.stride(0), out.data_ptr(), states.data_ptr(), step, layer
        )
        return out
