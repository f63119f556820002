"""The gated delta rule by the C++ kernel (gated_delta.cpp). kernels/gated_delta.py has the formulas."""

import torch
from torch import Tensor

from inflight.kernels.cpu.call_checks import require, require_states
from inflight.kernels.cpu.functions import DTYPES, AttentionStep, GatedDelta
from inflight.kernels.cpu.limits import gated_delta_problem, require_supported
from inflight.kernels.cpu.recording import KernelLibrary
from inflight.kernels.gated_delta import GatedDeltaShape, GatedDeltaWeights


class CpuGatedDelta:
    """Keeps the weights, to which the kernel has pointers.

    Raises:
        ConfigError: the kernel does not support the shape.
    """

    def __init__(self, kernels: KernelLibrary, shape: GatedDeltaShape, weights: GatedDeltaWeights) -> None:
        require_supported(gated_delta_problem(shape, torch.float32))
        num_heads = shape.num_value_heads
        for weight, size in (
            (weights.conv, (shape.kernel_size, shape.num_channels)),
            (weights.rates, (num_heads,)),
            (weights.step_bias, (num_heads,)),
            (weights.norm, (shape.value_dim,)),
        ):
            fits = weight.shape == size and weight.dtype == torch.float32 and weight.is_contiguous()
            require(fits, f"gated_delta needs a contiguous weight in float32 {list(size)}", weight)
        self._kernels = kernels
        self._shape = shape
        self._weights = weights

    @staticmethod
    def supports(shape: GatedDeltaShape, dtype: torch.dtype) -> bool:
        return gated_delta_problem(shape, dtype) is None

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
        fits = rows.stride(1) == 1 and rows.shape[1] == sum(shape.row_parts) and rows.dtype in DTYPES
        require(fits, f"gated_delta needs rows in float32 or bfloat16 with the parts {shape.row_parts}", rows)
        require_states(states, offsets, shape.state_shapes, (torch.float32, rows.dtype), step)
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
        out = torch.empty((len(rows), shape.num_value_heads * shape.value_dim), dtype=rows.dtype, device="cpu")
        self._kernels.inflight_gated_delta(
            rows.data_ptr(), rows.stride(0), out.data_ptr(), states.data_ptr(), step, layer
        )
        return out
