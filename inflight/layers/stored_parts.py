"""`StoredParts`: the parts of a weight, until the layer puts them together."""

import torch
from torch import Tensor

from inflight.kernels.quantized_weight import QuantizedWeight, concatenate_rows
from inflight.kernels.weight_rows import HeldRows, JoinedRows, StoredWeight, WeightRows
from inflight.layers.linear_method import LinearMethod

Part = Tensor | QuantizedWeight | WeightRows


class StoredParts:
    """The parts of one weight, as the checkpoint stores them. A layer keeps them until it puts its weight together."""

    def __init__(self, method: LinearMethod, dtype: torch.dtype) -> None:
        self._method = method
        self._dtype = dtype
        self._parts: dict[int, Part] = {}  # by the first row in the whole weight

    @property
    def num_quantized(self) -> int:
        return sum(HeldRows.of(part).is_quantized for part in self._parts.values())

    def accept(self, part: Part, *, first_row: int = 0) -> bool:
        """See `WeightSlot.accept`. Floats are kept only if they need no conversion and `LinearMethod.prepare` copies them, and
        rows to read later only if it copies what is read."""
        if isinstance(part, WeightRows) and not self._method.copies_weights:
            return False
        if isinstance(part, Tensor) and not (
            self._method.copies_weights and part.dtype == self._dtype and part.stride(1) == 1
        ):
            return False
        self._parts[first_row] = part
        return True

    def assemble(self, weight: Tensor) -> StoredWeight:
        """Returns the whole weight. If all parts were accepted and fit together, the result is one quantized weight, or the
        floats as they are stored. Otherwise the result is `weight`. The loader has already copied the parts that were not
        accepted to `weight`, and this method copies the accepted parts."""
        parts = [part for _, part in sorted(self._parts.items(), key=lambda item: item[0])]
        if parts and sum(part.shape[0] for part in parts) == len(weight):
            if any(isinstance(part, WeightRows) for part in parts):
                rows = [HeldRows.of(part) for part in parts]
                if len({part.form for part in rows}) == 1:
                    return JoinedRows(rows)
                parts = [part.read(0, part.shape[0]) for part in rows]
            floats = [part for part in parts if isinstance(part, Tensor)]
            quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
            if not quantized:
                return floats
            if not floats and (together := concatenate_rows(quantized)) is not None:
                return together
        for start, part in self._parts.items():
            HeldRows.of(part).copy_to(weight[start : start + part.shape[0]])
        return [weight]
