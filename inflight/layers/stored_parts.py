"""`StoredParts`: the parts of a weight, until the layer puts them together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from inflight.kernels.quantized_weight import QuantizedWeight, concatenate_rows
from inflight.layers.linear_method import LinearMethod


class StoredParts:
    """The parts of one weight, as the checkpoint stores them. A layer keeps them until it puts its weight together."""

    def __init__(self, method: LinearMethod, dtype: torch.dtype) -> None:
        self._method = method
        self._dtype = dtype
        self._parts: dict[int, Tensor | QuantizedWeight] = {}  # by the first row in the whole weight

    @property
    def num_quantized(self) -> int:
        return sum(isinstance(part, QuantizedWeight) for part in self._parts.values())

    def accept(self, part: Tensor | QuantizedWeight, *, first_row: int = 0) -> bool:
        """See `WeightSlot.accept`. Floats are kept only if they need no conversion and `LinearMethod.prepare` copies them."""
        if isinstance(part, Tensor) and not (
            self._method.copies_weights and part.dtype == self._dtype and part.stride(1) == 1
        ):
            return False
        self._parts[first_row] = part
        return True

    def assemble(self, weight: Tensor) -> Sequence[Tensor] | QuantizedWeight:
        """Returns the whole weight. If all parts were accepted and fit together, the result is one quantized weight, or the
        floats as they are stored. Otherwise the result is `weight`. The loader has already copied the parts that were not
        accepted to `weight`, and this method copies the accepted parts."""
        parts = [part for _, part in sorted(self._parts.items(), key=lambda item: item[0])]
        if parts and sum(part.shape[0] for part in parts) == len(weight):
            floats = [part for part in parts if isinstance(part, Tensor)]
            quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
            if not quantized:
                return floats
            if not floats and (together := concatenate_rows(quantized)) is not None:
                return together
        for start, part in self._parts.items():
            weight[start : start + part.shape[0]] = part if isinstance(part, Tensor) else part.dequantize()
        return [weight]
