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

    oneDNN's kernel for 4 rows is faster than those for 1 and 2 (a 6144x1024 weight: 340 us against 410 and 480), so so
    few rows are repeated.
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
        num_tokens = x.shape[0]
        if 1 <= num_tokens <= 2:
            x = x.repeat(4 // num_tokens, 1)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out[:num_tokens] if num_tokens <= 2 else out


def select_linear_method(device: torch.device, dtype: torch.dtype) -> LinearMethod:
    """The fastest method there is. In float32 the plain one already reaches the machine's limits."""
    if device.type == "cpu" and dtype == torch.bfloat16 and OneDnnPackedLinear.is_available():
        return OneDnnPackedLinear()
    return PlainLinear()
