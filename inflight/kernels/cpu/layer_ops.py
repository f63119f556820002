"""`CpuLayerOps`: norms, rotary embedding and selection of rows by the C++ kernels, which compute in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.kernels.cpu.library import DTYPES, KernelLibrary
from inflight.kernels.layer_ops import LayerOps


class CpuLayerOps(LayerOps):
    """Inputs are float32 or bfloat16. Weights, cos and sin have the dtype of the input."""

    def __init__(self, kernels: KernelLibrary) -> None:
        self.kernels = kernels

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._add_and_norm(None, x, weight, eps)

    def add_and_rms_norm(self, delta: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert delta.shape == residual.shape and delta.stride(1) == 1
        return self._add_and_norm(delta, residual, weight, eps)

    def _add_and_norm(self, delta: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        num_rows, size = x.shape
        assert x.stride(1) == 1
        out = torch.empty((num_rows, size), dtype=x.dtype)
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
        num_tokens, num_heads, head_dim = heads.shape
        assert heads.stride()[1:] == (head_dim, 1) and cos.is_contiguous() and sin.is_contiguous()
        self.kernels.inflight_norm_and_rotate(
            heads.data_ptr(),
            heads.stride(0),
            None if weight is None else weight.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            num_tokens,
            num_heads,
            head_dim,
            eps,
            DTYPES[heads.dtype],
        )
        return heads

    def multiply_sigmoid(self, x: Tensor, gate: Tensor) -> None:
        assert x.shape == gate.shape and x.stride(1) == gate.stride(1) == 1 and x.dtype == gate.dtype
        self.kernels.inflight_multiply_sigmoid(
            x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0), *x.shape, DTYPES[x.dtype]
        )

    def select_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        assert x.stride(1) == 1 and rows.dtype == torch.int64 and rows.is_contiguous()
        out = torch.empty((len(rows), x.shape[1]), dtype=x.dtype)
        stride, row_bytes = x.stride(0) * x.itemsize, x.shape[1] * x.itemsize
        self.kernels.inflight_select_rows(x.data_ptr(), stride, rows.data_ptr(), out.data_ptr(), len(rows), row_bytes)
        return out
