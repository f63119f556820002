"""`LinearMethod`: how x @ weight.T is computed. Chosen per device and dtype; other weight formats are further methods."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor


class LinearMethod(ABC):
    """Stateless. A layer calls `prepare` once with its plain weight, and `apply` with what it returned ever after."""

    @abstractmethod
    def prepare(self, weight: Tensor) -> Tensor:
        """The weight in the form `apply` reads. `weight` [out_features, in_features]; the caller drops it afterwards."""

    @abstractmethod
    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [num_tokens, in_features] -> [num_tokens, out_features], in the dtype of x."""


class PlainLinear(LinearMethod):
    """The weight as it is; the library behind torch chooses."""

    def prepare(self, weight: Tensor) -> Tensor:
        return weight

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


class OneDnnPackedLinear(LinearMethod):
    """The weight repacked once into oneDNN's blocked layout: up to twice as fast as `F.linear` in bf16.

    3072x1024 on 2 cores Zen 4: 1 row 28 GB/s instead of 16, 32 rows 384 GFLOP/s instead of 266. The batch size that
    `_reorder_linear_weight` takes as a hint makes no difference, so none is given.

    Rows are padded to one of some sixty counts. oneDNN compiles a kernel for every (row count, weight shape) it meets and keeps
    about 0.7 MiB of code for each of up to 1,024: over all counts a long-running engine would fill a gigabyte with them.
    The least count is 4, whose kernel is faster than those for 1 and 2 (a 6144x1024 weight: 340 us against 410 and 480).
    """

    @staticmethod
    def is_available() -> bool:
        return torch.backends.mkldnn.is_available() and bool(  # type: ignore[no-untyped-call]
            torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )

    def prepare(self, weight: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        return packed

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        num_rows = x.shape[0]
        padded = padded_rows(num_rows)
        if padded == num_rows:
            exact: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
            return exact
        x = F.pad(x, (0, 0, 0, padded - num_rows))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out[:num_rows]


def padded_rows(num_rows: int) -> int:
    """The next row count that kernels are compiled for: steps of 4 up to 32, of 8 up to 128, then of an eighth at most."""
    if num_rows <= 32:
        step = 4
    elif num_rows <= 128:
        step = 8
    else:
        step = 16 if num_rows <= 256 else 32 if num_rows <= 512 else 64
    return -(-num_rows // step) * step


def select_linear_method(device: torch.device, dtype: torch.dtype) -> LinearMethod:
    """The fastest method there is. In float32 the plain one already reaches the machine's limits."""
    if device.type == "cpu" and dtype == torch.bfloat16 and OneDnnPackedLinear.is_available():
        return OneDnnPackedLinear()
    return PlainLinear()
