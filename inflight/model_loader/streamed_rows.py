"""`StreamedRows`: a weight of a checkpoint of which some rows at a time are read (`WeightRows`)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.kernels.weight_rows import LARGE, WeightRows, form_of
from inflight.layers.weights import WeightSlot
from inflight.model_loader.weight_source import StoredTensor, WeightSource

_Check = Callable[[str, Tensor | QuantizedWeight], Tensor | QuantizedWeight]


class StreamedRows(WeightRows):
    """The part `held` of a weight. Floats are read in `dtype`. `check`: gets the name and each part that is read.

    The source is opened for each read, so that the pages of a mapped file do not stay in the process.
    """

    def __init__(
        self, source: WeightSource, name: str, held: Sequence[slice], dtype: torch.dtype, check: _Check
    ) -> None:
        rows, columns = held
        self.shape = (rows.stop - rows.start, columns.stop - columns.start)
        self._source = source
        self._name = name
        self._first_row = rows.start
        self._columns = columns
        self._dtype = dtype
        self._check = check
        self.form = form_of(self.read(0, 1))

    def read(self, start: int, stop: int) -> Tensor | QuantizedWeight:
        rows = slice(self._first_row + start, self._first_row + stop)
        with self._source.open() as read:
            part = self._check(self._name, read(self._name, (rows, self._columns)))
        return part.to(self._dtype) if isinstance(part, Tensor) else part


def is_streamed(slot: WeightSlot, stored: StoredTensor) -> bool:
    """Whether the part of the tensor that a slot is for is read so: if it is large, or becomes floats."""
    if len(slot.shape) != 2 or slot.rows is not None or slot.offset:
        return False
    return slot.destination.numel() >= LARGE or (stored.is_quantized and slot.accept is None)
