"""`LinearMethod`: computes x @ weight.T. The method is chosen by device, dtype and quantization.

`prepare` turns the weight of a layer into a callable that every step uses. The weight is a `QuantizedWeight` if the checkpoint
is quantized. Otherwise it is a list of tensors in the engine's dtype, which together have the rows of the weight. A very large
weight is `WeightRows`, of which some rows at a time are read.
"""

from __future__ import annotations

import ctypes
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.kernels.cpu.huge_pages import HugePages
from inflight.kernels.cpu.limits import linear_problem
from inflight.kernels.cpu.packed_heads import PackedHeads
from inflight.kernels.cpu.packing import pack_float, pack_integers, quantize_rows
from inflight.kernels.cpu.packing_rows import pack_rows
from inflight.kernels.gate import multiply_gate
from inflight.kernels.quantized_weight import QuantizedWeight, fitting_group_size
from inflight.kernels.weight_rows import StoredWeight, in_memory, rows_if_large

logger = logging.getLogger(__name__)


class PreparedLinear(Protocol):
    """A weight that is ready to multiply."""

    def __call__(self, x: Tensor, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """x [num_rows, in_features] -> [num_rows, out_features] in `out_dtype`; with a gate [num_rows, out_features / 2].

        If `out` is given, the result is written to `out`, and `out` is returned. It must be contiguous and have the result's
        shape and dtype.
        """


class PreparedExperts(Protocol):
    """The experts of a layer, ready to compute."""

    def __call__(self, hidden: Tensor, choices: Tensor) -> Tensor:
        """hidden [num_tokens, size], choices int32 [num_tokens, n, 2] (kernels/expert_choice.py) -> [num_tokens, size], the
        weighted sums of the experts' results."""


class PreparedHeads(Protocol):
    """A weight for each head, ready to multiply."""

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """x [num_rows, num_heads, in_features] -> out [num_rows, num_heads, out_features]. Rows and heads may be strided."""


@dataclass(frozen=True, kw_only=True)
class LinearChoice:
    """The result of a measurement: how weights of one kind and shape are multiplied fastest with `num_rows` rows, or with fewer
    rows, but more than half as many.

    `way` is "library" (torch's library), or the tile size of the Triton kernel. `microseconds` is the time of this way, and
    `library_microseconds` is the time of the library.
    """

    out_features: int
    in_features: int
    num_rows: int
    way: str
    microseconds: float
    library_microseconds: float


class LinearMethod(ABC):
    """Computes the products of linear layers. All layers of a model use one object, which may allocate memory for all of them.

    `copies_weights`: whether `prepare` copies the weights. If it does not, the weights must not be views of a mapped file.
    """

    copies_weights = False

    @abstractmethod
    def prepare(self, weight: StoredWeight, bias: Tensor | None, *, gate: str | None = None) -> PreparedLinear:
        """Prepares a weight for multiplication. weight: [out_features, in_features] in total; the caller does not use it after
        this call. It can be `WeightRows` only if `copies_weights`. bias: [out_features].

        `gate`: one of `MLP_GATES` (kernels/gate.py). If it is given, the result is gate(first half of the features) * second
        half (arXiv:2002.05202).
        """

    def prepare_heads(self, weights: Tensor) -> PreparedHeads:
        """Prepares one weight for each head: [num_heads, out_features, in_features]. They stay floats."""

        def multiply(x: Tensor, out: Tensor) -> None:
            out.copy_((x.transpose(0, 1) @ weights.mT).transpose(0, 1))

        return multiply

    def prepare_experts(
        self,
        gate_up: Sequence[PreparedLinear],
        down: Sequence[PreparedLinear],
        gate: str,
        shared: Callable[[Tensor], Tensor] | None,
    ) -> PreparedExperts | None:
        """Experts that this method computes together, from what `prepare` has made of their weights, which the caller uses no
        more; None if it computes each one by itself. `shared`: computes the shared expert, if there is one: hidden -> float32
        [num_tokens, size]."""
        return None

    def is_batch_invariant(self, in_features: int) -> bool:
        """Whether the result of a row is the same, bit for bit, whatever other rows are in the batch."""
        return False

    def tune(self, max_num_rows: int) -> list[LinearChoice]:
        """Measures the ways to multiply up to `max_num_rows` rows, and chooses the fastest way for each weight and number of
        rows. Returns the choices.

        Called in a task (see `Device`) while nothing else is queued, after all weights are prepared and before CUDA graphs are
        captured. A method that has only one way to multiply returns an empty list.
        """
        return []


class PlainLinear(LinearMethod):
    """Multiplies in plain torch. A quantized weight is dequantized to `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def prepare(self, weight: StoredWeight, bias: Tensor | None, *, gate: str | None = None) -> PreparedLinear:
        weight = in_memory(weight)
        if isinstance(weight, QuantizedWeight):
            plain = weight.dequantize().to(self._dtype)
        else:
            plain = weight[0] if len(weight) == 1 else torch.cat(list(weight))

        def multiply(x: Tensor, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
            result = F.linear(x, plain, bias)
            if gate is not None:
                result = multiply_gate(result, gate)
            return result.to(out_dtype) if out is None else out.copy_(result)

        return multiply


class KernelLinear(LinearMethod):
    """Multiplies with the C++ kernels, which have a weight layout of their own. If `bits` is 8 or 4, weights in floats are
    quantized first.

    If the kernels do not support a weight's shape, `PlainLinear` is used for it.
    """

    copies_weights = True

    def __init__(self, kernels: ctypes.CDLL, dtype: torch.dtype, *, bits: int | None, group_size: int) -> None:
        self._kernels = kernels
        self._dtype = dtype
        self._bits = bits
        self._group_size = group_size
        self._memory = HugePages()

    def is_batch_invariant(self, in_features: int) -> bool:
        return _is_supported(in_features, has_integers=True)

    def prepare(self, weight: StoredWeight, bias: Tensor | None, *, gate: str | None = None) -> PreparedLinear:
        rows = rows_if_large(weight, self._bits)
        in_features = weight[0].shape[1] if isinstance(weight, Sequence) else weight.shape[1]
        has_integers = self._bits is not None or isinstance(weight, QuantizedWeight)
        if not _is_supported(in_features, has_integers=has_integers or (rows is not None and rows.is_quantized)):
            return PlainLinear(self._dtype).prepare(weight, bias, gate=gate)
        quantize = None if self._bits is None else self._quantizer(self._bits, in_features)
        if rows is not None:
            return pack_rows(self._kernels, self._memory, rows, bias, gate=gate, quantize=quantize)
        held = in_memory(weight)
        if not isinstance(held, QuantizedWeight) and quantize is not None:
            held = quantize(held)
        if not isinstance(held, QuantizedWeight):
            return pack_float(self._kernels, self._memory, held, bias, gate=gate)
        return pack_integers(self._kernels, self._memory, held, bias, gate=gate)

    def prepare_heads(self, weights: Tensor) -> PreparedHeads:
        if not _is_supported(weights.shape[2], has_integers=False):
            return super().prepare_heads(weights)
        heads = [pack_float(self._kernels, self._memory, [each], None, gate=None) for each in weights]
        return PackedHeads(self._kernels, heads)

    def _quantizer(self, bits: int, in_features: int) -> Callable[[Sequence[Tensor]], QuantizedWeight]:
        group_size = fitting_group_size(in_features, self._group_size)
        if bits == 4 and group_size is None:
            logger.warning("a weight with %d input features gets 8 bits: 4 bits need a multiple of 32", in_features)
            bits = 8
        return partial(quantize_rows, self._kernels, bits=bits, group_size=group_size or 0)


def _is_supported(in_features: int, *, has_integers: bool) -> bool:
    """Whether the C++ kernels support weights with so many input features, in rows of one group."""
    return linear_problem(in_features, group_size=in_features, bits=8 if has_integers else 16) is None
