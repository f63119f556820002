"""`layer_norm`, `activate` and `end_with_activation`: what encoders compute between matrix products, and decoders do not.

On a CPU the C++ kernels compute them, in float32; elsewhere torch does.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.kernels.cpu.call_checks import require
from inflight.kernels.cpu.functions import DTYPES
from inflight.kernels.cpu.layer_ops import CpuLayerOps, is_weight
from inflight.kernels.cpu.linear import PackedLinear
from inflight.kernels.gate import ACTIVATIONS, GATE_CODES
from inflight.kernels.layer_ops import LayerOps


def layer_norm(
    ops: LayerOps, delta: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """Adds `delta` (None: nothing) to x in place, and returns (x - mean) / sqrt(variance + eps) * weight + bias
    (arXiv:1607.06450). x, delta: [num_rows, size], with contiguous rows; weight, bias: [size]."""
    if not isinstance(ops, CpuLayerOps):
        if delta is not None:
            x.add_(delta)
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    num_rows, size = x.shape
    fits = x.stride(1) == 1 and x.dtype in DTYPES
    fits = fits and (delta is None or (delta.shape == x.shape and delta.stride(1) == 1 and delta.dtype == x.dtype))
    fits = fits and all(each is None or is_weight(each, (size,), x.dtype) for each in (weight, bias))
    needed = "layer_norm needs rows in float32 or bfloat16, and a weight and a bias of their size and dtype"
    require(fits, needed, x, delta, weight, bias)
    out = torch.empty((num_rows, size), dtype=x.dtype, device="cpu")
    added = (None, 0) if delta is None else (delta.data_ptr(), delta.stride(0))
    weights = weight.data_ptr(), None if bias is None else bias.data_ptr()
    ops.kernels.inflight_layer_norm(
        x.data_ptr(), x.stride(0), *added, *weights, out.data_ptr(), num_rows, size, eps, DTYPES[x.dtype]
    )
    return out


def end_with_activation(product: object, activation: str) -> bool:
    """If the C++ kernels compute `product`, which has no gate, its results go through the activation from now on, before they
    are rounded to their dtype. Returns whether this is so. If it is not, call `activate` with the results."""
    if not isinstance(product, PackedLinear):
        return False
    product.weight.activation = GATE_CODES[activation]
    return True


def activate(ops: LayerOps, x: Tensor, activation: str) -> None:
    """Replaces x [num_rows, size], with contiguous rows, by activation(x): SILU, GELU_TANH, GELU or RELU."""
    if not isinstance(ops, CpuLayerOps):
        x.copy_(ACTIVATIONS[activation](x))
        return
    require(x.stride(1) == 1 and x.dtype in DTYPES, "activate needs rows in float32 or bfloat16", x)
    ops.kernels.inflight_activate(x.data_ptr(), x.stride(0), *x.shape, GATE_CODES[activation], DTYPES[x.dtype])
