"""`CpuLayerOps`: norms, rotary embedding and selection of rows by the C++ kernels, which compute in float32."""

import torch
from torch import Tensor

from inflight.kernels.cpu.call_checks import require, require_rows
from inflight.kernels.cpu.functions import DTYPES
from inflight.kernels.cpu.recording import KernelLibrary
from inflight.kernels.gate import GATE_CODES
from inflight.kernels.layer_ops import LayerOps


class CpuLayerOps(LayerOps):
    """Inputs are float32 or bfloat16. Weights, cos and sin have the dtype of the input."""

    def __init__(self, kernels: KernelLibrary) -> None:
        self.kernels = kernels

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._add_and_norm(None, x, weight, eps)

    def add_and_rms_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        fits = delta.shape == residual.shape and delta.stride(1) == 1 and delta.dtype == residual.dtype
        require(fits, "add_and_rms_norm needs two inputs of one shape and dtype", delta, residual)
        return self._add_and_norm(delta, residual, weight, eps)

    def _add_and_norm(self, delta: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        num_rows, size = x.shape
        fits = x.stride(1) == 1 and x.dtype in DTYPES and is_weight(weight, (size,), x.dtype)
        require(fits, "rms_norm needs rows in float32 or bfloat16, and a weight of their size and dtype", x, weight)
        out = torch.empty((num_rows, size), dtype=x.dtype, device="cpu")
        self.kernels.inflight_rms_norm(
            x.data_ptr(),
            x.stride(0),
            None if delta is None else delta.data_ptr(),
            0 if delta is None else delta.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            num_rows,
            size,
            eps,
            DTYPES[x.dtype],
        )
        return out

    def norm_and_rotate(self, heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """See `LayerOps`. The result is `heads` itself, changed in place."""
        size = len(heads), heads.shape[2]
        fits = size[1] % 2 == 0 and all(is_weight(each, size, heads.dtype) for each in (cos, sin))
        require(
            fits, "norm_and_rotate needs even heads, and cos and sin for each token in their dtype", heads, cos, sin
        )
        self._change_heads(heads, weight, eps, cos.data_ptr(), sin.data_ptr())
        return heads

    def norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> None:
        self._change_heads(heads, weight, eps, None, None)

    def _change_heads(self, heads: Tensor, weight: Tensor | None, eps: float, cos: int | None, sin: int | None) -> None:
        num_tokens, num_heads, head_dim = heads.shape
        fits = heads.stride(2) == 1 and heads.dtype in DTYPES
        fits = fits and (weight is None or is_weight(weight, (num_heads, head_dim), heads.dtype))
        require(
            fits, "a norm of heads needs float32 or bfloat16, and a weight for each head in their dtype", heads, weight
        )
        self.kernels.inflight_norm_and_rotate(
            heads.data_ptr(),
            *heads.stride()[:2],
            None if weight is None else weight.data_ptr(),
            cos,
            sin,
            num_tokens,
            num_heads,
            head_dim,
            eps,
            DTYPES[heads.dtype],
        )

    def multiply_activation(self, x: Tensor, gate: Tensor, activation: str) -> None:
        fits = (
            x.shape == gate.shape and x.stride(1) == gate.stride(1) == 1 and x.dtype == gate.dtype and x.dtype in DTYPES
        )
        require(fits, "multiply_activation needs two inputs of one shape, in float32 or bfloat16", x, gate)
        pointers = x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0)
        self.kernels.inflight_multiply_activation(*pointers, *x.shape, GATE_CODES[activation], DTYPES[x.dtype])

    def add_and_scale(self, x: Tensor, delta: Tensor | None, factor: Tensor | None) -> None:
        fits = x.stride(1) == 1 and x.dtype in DTYPES
        fits = fits and (delta is None or (delta.shape == x.shape and delta.stride(1) == 1 and delta.dtype == x.dtype))
        sizes = (1,), (len(x), 1)
        fits = fits and (factor is None or any(is_weight(factor, size, torch.float32) for size in sizes))
        needed = (
            "add_and_scale needs two inputs of one shape, in float32 or bfloat16, and one factor or one for each row"
        )
        require(fits, needed, x, delta, factor)
        added = (None, 0) if delta is None else (delta.data_ptr(), delta.stride(0))
        scale = (None, 0) if factor is None else (factor.data_ptr(), factor.dim() - 1)
        self.kernels.inflight_add_and_scale(x.data_ptr(), x.stride(0), *added, *scale, *x.shape, DTYPES[x.dtype])

    def copy_heads(self, x: Tensor, out: Tensor) -> None:
        fits = x.shape == out.shape and x.dtype == out.dtype and x.stride(2) == out.stride(2) == 1 and x.dtype in DTYPES
        require(fits, "copy_heads needs two tensors of one shape, in float32 or bfloat16", x, out)
        pointers = x.data_ptr(), *x.stride()[:2], out.data_ptr(), *out.stride()[:2]
        if x.data_ptr() != out.data_ptr():
            self.kernels.inflight_copy_heads(*pointers, *x.shape, DTYPES[x.dtype])

    def select_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        fits = x.stride(1) == 1 and rows.dtype == torch.int64 and rows.dim() == 1 and rows.is_contiguous()
        require(fits, "select_rows needs rows without gaps, and indices in int64", x, rows)
        require_rows(rows, len(x))
        out = torch.empty((len(rows), x.shape[1]), dtype=x.dtype, device="cpu")
        stride, row_bytes = x.stride(0) * x.itemsize, x.shape[1] * x.itemsize
        self.kernels.inflight_select_rows(x.data_ptr(), stride, rows.data_ptr(), out.data_ptr(), len(rows), row_bytes)
        return out


def is_weight(weight: Tensor, size: tuple[int, ...], dtype: torch.dtype) -> bool:
    return weight.shape == size and weight.dtype == dtype and weight.is_contiguous()
