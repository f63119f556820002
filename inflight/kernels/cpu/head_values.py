"""Checks of what attention has for each head besides queries and keys: sinks and position biases. Most models have neither."""

import torch
from torch import Tensor

from inflight.kernels.cpu.call_checks import require


def require_of_heads(num_heads: int, sinks: Tensor | None, position_bias: Tensor | None) -> None:
    """Requires that what `AttentionParams` has for each head is as attention.cpp reads it."""
    if sinks is not None:
        fit = sinks.shape == (num_heads,) and sinks.dtype == torch.float32 and sinks.is_contiguous()
        require(fit, f"attention needs a sink in float32 for each of {num_heads} heads", sinks)
    if position_bias is not None:
        fit = position_bias.dim() == 2 and len(position_bias) == num_heads and position_bias.shape[1] % 2 == 1
        fit = fit and position_bias.dtype == torch.float32 and position_bias.is_contiguous()
        needed = f"attention needs biases in float32 for an odd number of distances, for each of {num_heads} heads"
        require(fit, needed, position_bias)
