"""The short convolution of LFM2 (arXiv:2511.23404) in plain torch and by the C++ kernel (cpu/short_conv.cpp).

A token's row has three parts of num_channels numbers: b, c and x. Per channel, with the weights w of the last tokens:

    out[t] = c[t] * (bias + sum over k of w[k] * (b * x)[t - kernel_size + 1 + k])
"""

import torch
from torch import Tensor

from inflight.kernels.cpu.call_checks import require, require_states
from inflight.kernels.cpu.functions import DTYPES, AttentionStep, ShortConv
from inflight.kernels.cpu.limits import require_supported, short_conv_problem
from inflight.kernels.cpu.recording import KernelLibrary


def short_conv(rows: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Computes the next tokens of one sequence.

    Args:
        rows: [num_tokens, 3 * num_channels].
        inputs: [kernel_size - 1, num_channels], the last products b * x before these tokens; zeros if there are none.
        weight, bias: float32 [kernel_size, num_channels] and [num_channels].

    Returns:
        [num_tokens, num_channels] in the dtype of `rows`, and the new `inputs`.
    """
    b, c, x = rows.chunk(3, dim=-1)
    seen = torch.cat([inputs.to(rows.dtype), b * x])
    total = (seen.float().unfold(0, len(weight), 1) * weight.T).sum(-1)  # [num_tokens, num_channels]
    if bias is not None:
        total += bias
    return c * total.to(rows.dtype), seen[len(rows) :]


class CpuShortConv:
    """The C++ kernel. Keeps the weights, to which it has pointers. They are those of `short_conv`.

    Raises:
        ConfigError: the kernel does not support the shape.
    """

    def __init__(self, kernels: KernelLibrary, weight: Tensor, bias: Tensor | None) -> None:
        kernel_size, num_channels = weight.shape
        require_supported(short_conv_problem(num_channels, kernel_size, torch.float32))
        for each in (weight, torch.zeros(num_channels, dtype=torch.float32, device="cpu") if bias is None else bias):
            fits = each.shape[-1] == num_channels and each.dtype == torch.float32 and each.is_contiguous()
            require(fits, f"short_conv needs contiguous weights in float32 for {num_channels} channels", each)
        self._kernels = kernels
        self._weight = weight
        self._bias = bias

    @staticmethod
    def supports(weight: Tensor, dtype: torch.dtype) -> bool:
        kernel_size, num_channels = weight.shape
        return short_conv_problem(num_channels, kernel_size, dtype) is None

    def __call__(self, rows: Tensor, states: Tensor, offsets: list[int], step: AttentionStep) -> Tensor:
        """Computes a step, and keeps the states in their blocks.

        Args:
            rows: [num_tokens, 3 * num_channels].
            states: uint8 [num_blocks, bytes], the `inputs` of `short_conv`.
            step: which rows belong to which sequence, and their block tables.

        Returns:
            [num_tokens, num_channels]
        """
        kernel_size, num_channels = self._weight.shape
        fits = rows.stride(1) == 1 and rows.shape[1] == 3 * num_channels and rows.dtype in DTYPES
        require(fits, f"short_conv needs rows in float32 or bfloat16 of 3 * {num_channels} numbers", rows)
        require_states(states, offsets, [(kernel_size - 1, num_channels)], [rows.dtype], step)
        bias = None if self._bias is None else self._bias.data_ptr()
        layer = ShortConv(
            num_channels, kernel_size, states.stride(0), self._weight.data_ptr(), bias, DTYPES[rows.dtype]
        )
        out = torch.empty((len(rows), num_channels), dtype=rows.dtype, device="cpu")
        self._kernels.inflight_short_conv(
            rows.data_ptr(), rows.stride(0), out.data_ptr(), states.data_ptr(), step, layer
        )
        return out
