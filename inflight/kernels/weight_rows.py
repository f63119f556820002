"""`WeightRows`: a weight that is so large that it must not be in memory twice. Its rows are read when they are packed."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from inflight.kernels.quantized_weight import QuantizedWeight, concatenate_rows

LARGE = 2**26  # weights; in bfloat16 they have 128 MB
AT_ONCE = 2**24  # weights of the rows that are read at once; as float32 they have 64 MB


class WeightRows(ABC):
    """A weight [out_features, in_features], or a rank's part of one.

    Attributes:
        shape: (out_features, in_features).
        form: weights of the same form can be packed together. The dtype of floats, or the bits, group size and table of
            integers.
    """

    shape: tuple[int, int]
    form: object

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor | QuantizedWeight:
        """The rows [start, stop). Floats may be a view of a mapped file; then the caller drops them before it reads others."""

    @property
    def step(self) -> int:
        """How many rows are read at once: a multiple of 64."""
        return max(1, AT_ONCE // self.shape[1] // 64) * 64

    @property
    def is_quantized(self) -> bool:
        return not isinstance(self.form, torch.dtype)

    def copy_to(self, out: Tensor) -> None:
        """Writes all rows, as floats, to `out` of the weight's shape."""
        num_rows = self.shape[0]
        for start in range(0, num_rows, self.step):
            stop = min(start + self.step, num_rows)
            part = self.read(start, stop)
            if isinstance(part, QuantizedWeight):
                part = part.dequantize()
            out[start:stop] = part


class HeldRows(WeightRows):
    """Of a weight that is in memory."""

    def __init__(self, weight: Tensor | QuantizedWeight) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.form = form_of(weight)
        self._weight = weight

    @staticmethod
    def of(weight: Tensor | QuantizedWeight | WeightRows) -> WeightRows:
        """`weight` itself, if it is rows."""
        return weight if isinstance(weight, WeightRows) else HeldRows(weight)

    def read(self, start: int, stop: int) -> Tensor | QuantizedWeight:
        weight = self._weight
        if isinstance(weight, Tensor):
            return weight[start:stop]
        return weight.changed(weight.values[start:stop], lambda each: each[start:stop])


class JoinedRows(WeightRows):
    """The rows of several weights of one form, one after the other."""

    def __init__(self, parts: Sequence[WeightRows]) -> None:
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        self.form = parts[0].form
        self._parts = parts

    def read(self, start: int, stop: int) -> Tensor | QuantizedWeight:
        found: list[Tensor | QuantizedWeight] = []
        first = 0
        for part in self._parts:
            num_rows = part.shape[0]
            begin = max(start - first, 0)
            end = min(stop - first, num_rows)
            if begin < end:
                found.append(part.read(begin, end))
            first += num_rows
        return join(found)


def join(parts: Sequence[Tensor | QuantizedWeight]) -> Tensor | QuantizedWeight:
    """One weight with the rows of all `parts`, which have one form."""
    if len(parts) == 1:
        return parts[0]
    floats = [part for part in parts if isinstance(part, Tensor)]
    if floats:
        return torch.cat(floats)
    integers = [part for part in parts if isinstance(part, QuantizedWeight)]
    together = concatenate_rows(integers)
    assert together is not None, "of one form"
    return together


def form_of(weight: Tensor | QuantizedWeight) -> object:
    """See `WeightRows.form`."""
    return weight.dtype if isinstance(weight, Tensor) else (weight.format, weight.table)


# Floats have one dtype, and the rows of the weight are those of all of them.
StoredWeight = Sequence[Tensor] | QuantizedWeight | WeightRows


def rows_if_large(weight: StoredWeight, bits: int | None) -> WeightRows | None:
    """The rows of a weight that is read later, or that is in memory and so large that its integers must not be there twice.
    `bits`: of these integers, or None if the weight stays as it is."""
    if isinstance(weight, WeightRows):
        return weight
    if isinstance(weight, QuantizedWeight) or bits is None:
        return None
    num_weights = sum(part.numel() for part in weight)
    if num_weights < LARGE:
        return None
    parts = [HeldRows(part) for part in weight]
    return JoinedRows(parts)


def in_memory(weight: StoredWeight) -> Sequence[Tensor] | QuantizedWeight:
    """The weight, read as a whole if it is rows."""
    if not isinstance(weight, WeightRows):
        return weight
    whole = weight.read(0, weight.shape[0])
    return [whole] if isinstance(whole, Tensor) else whole
